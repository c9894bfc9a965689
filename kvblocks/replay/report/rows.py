"""Shared by the sections: rows of a result by size and policy, and figures and tables with a line for each row."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvblocks.replay.report.charts import (
    WIDE,
    Axis,
    Bar,
    Kind,
    Line,
    bar_chart,
    for_both,
    line_chart,
    line_legend,
    part_legend,
)
from kvblocks.replay.report.markup import Element, count, element, fold, label, percent, table
from kvblocks.replay.result import Result, Row

RATE = Axis("hit rate", [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], shown=lambda share: f"{100 * share:.0f} %")


def size_name(row: Row) -> str:
    """Return the name of a row's size, such as "949 blocks (5.0 %)"."""
    return f"{count(row.num_blocks)} blocks ({percent(row.share)})"


def policies(rows: Iterable[Row]) -> dict[str, int]:
    """Return the style number of each policy, numbered in the order of first appearance."""
    return {name: number for number, name in enumerate(dict.fromkeys(row.policy for row in rows))}


def by_size(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows of each size, the smallest first."""
    sizes: dict[int, list[Row]] = {}
    for row in rows:
        sizes.setdefault(row.num_blocks, []).append(row)
    return [sizes[size] for size in sorted(sizes)]


def policy_legend(rows: Iterable[Row], styles: dict[str, int]) -> Element:
    """Return the legend of the policies of these rows."""
    return line_legend([(label(name), styles[name]) for name in policies(rows)])


def grid(pictures: Iterable[Element]) -> Element:
    """Return small pictures side by side, as many in a row as fit."""
    return element("div", {"class": "grid"}, *pictures)


def rate_chart(name: str, lines: list[Line]) -> Element:
    """Return a chart of shares by size in blocks, with a legend. The vertical axis begins near the lowest share."""
    sizes = sorted({x for line in lines for x, _ in line.points})
    across = Axis("blocks of the pool", sizes, is_log=len(sizes) > 1 and sizes[-1] > 4 * sizes[0], shown=count)
    rates = [y for line in lines for _, y in line.points]
    low, high = math.floor(min(rates, default=0.0) * 10), math.ceil(max(rates, default=1.0) * 10)
    up = replace(RATE, values=[tenth / 10 for tenth in range(low, max(high, low + 1) + 1)], low=low / 10)

    def draw(width: int) -> Element:
        return line_chart(name, lines, (across, up), (width, 400 if width >= WIDE else 300))

    return element("figure", {}, line_legend([(line.name, line.style) for line in lines]), for_both(draw))


def row_bars(
    name: str, result: Result, kinds: list[Kind], parts: Callable[[Row], list[float]], remark: Callable[[Row], str]
) -> Element:
    """Return a stacked bar for each row, in groups by size, with a legend of the kinds that occur."""
    used = [number for number, _ in enumerate(kinds) if any(parts(row)[number] for row in result.rows)]
    shown = [kinds[number] for number in used]
    groups = [
        (
            size_name(rows[0]),
            [Bar(label(row.policy), [parts(row)[number] for number in used], remark(row)) for row in rows],
        )
        for rows in by_size(result.rows)
    ]
    return element("figure", {}, part_legend(shown), for_both(lambda width: bar_chart(name, groups, shown, width)))


def row_table(caption: str, heads: list[str], result: Result, cells: Callable[[Row], list[str]]) -> Element:
    """Return a folded table with one line for each row."""
    lines = [[size_name(row), label(row.policy), *cells(row)] for rows in by_size(result.rows) for row in rows]
    return fold("Numbers", table(caption, ["size", "policy", *heads], lines))
