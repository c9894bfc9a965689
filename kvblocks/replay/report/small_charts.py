"""Small pictures that are shown side by side: one for each size, and two for each run."""

from collections.abc import Callable
from dataclasses import replace

from kvblocks.replay.report.charts import Axis, Line, for_both, line_chart, line_legend
from kvblocks.replay.report.markup import Element, count, element, fold, label, span, table
from kvblocks.replay.report.rows import RATE, grid, policy_legend, size_name
from kvblocks.replay.result import Bucket, Moment, Row

SIZE = (400, 230)
"""The width and height of a picture, in pixels."""
_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_Series = tuple[tuple[str, Callable[[Moment], int]], ...]
_SESSIONS: _Series = (
    ("live sessions", lambda moment: moment.live_sessions),
    ("running requests", lambda moment: moment.running_requests),
    ("waiting requests", lambda moment: moment.waiting_requests),
)
_BLOCKS: _Series = (
    ("cached", lambda moment: moment.cached_blocks),
    ("held by requests", lambda moment: moment.held_blocks),
    ("cached and hit since", lambda moment: moment.used_blocks),
)


def age_chart(rows: list[Row], styles: dict[str, int]) -> Element:
    """Return, for one size, the cumulative distribution of the times from eviction to miss."""
    name, buckets = size_name(rows[0]), max([row.misses.ages for row in rows], key=len)
    lines = [
        Line(label(row.policy), [(float(i), share) for i, share in enumerate(_shares(row))], styles[row.policy])
        for row in rows
        if any(bucket.count for bucket in row.misses.ages)
    ]
    if not lines:
        return _figure(name, element("p", {}, "No evicted reference was asked for again."))
    across = Axis(
        "evicted for at most",
        [float(number) for number in range(len(buckets))],
        shown=lambda number: _upto(buckets[int(number)]),
    )
    up = replace(RATE, name="of the evicted references")
    return _figure(name, line_chart(f"Ages of misses, {name}", lines, (across, up), SIZE))


def age_table(groups: list[list[Row]]) -> Element:
    """Return a table of the times from eviction to miss, with one line for each run."""
    longest = max([row.misses.ages for rows in groups for row in rows], key=len, default=[])
    heads = [_upto(bucket) for bucket in longest]
    cells = [
        [size_name(row), label(row.policy), *[count(bucket.count) for bucket in row.misses.ages]]
        for rows in groups
        for row in rows
    ]
    return table("Evicted references, by the time since their eviction", ["size", "policy", *heads], cells)


def runs_over_time(rows: list[Row], styles: dict[str, int]) -> list[Element]:
    """Return the runs of one size over time: hit rates in one picture, then two pictures for each run."""
    unit = _unit(max((moment.time_s for row in rows for moment in row.moments), default=0.0))
    rates = [
        Line(
            label(row.policy),
            [(moment.time_s / unit[1], moment.hits / moment.references) for moment in row.moments if moment.references],
            styles[row.policy],
        )
        for row in rows
    ]
    axes = Axis(unit[0]), RATE
    first = for_both(lambda width: line_chart("hit rate over time", rates, axes, (width, 240), has_marks=False))
    pictures = list[Element]()
    for row in rows:
        pictures.append(_series(row, "sessions and requests", _SESSIONS, unit))
        pictures.append(_series(row, "blocks", _BLOCKS, unit))
    figure = _figure("hit rate", policy_legend(rows, styles), first)
    return [figure, grid(pictures), fold("Numbers", *[_time_table(row) for row in rows])]


def _series(row: Row, name: str, series: _Series, unit: tuple[str, float]) -> Element:
    lines = [
        Line(of, [(moment.time_s / unit[1], float(value(moment))) for moment in row.moments], style)
        for style, (of, value) in enumerate(series)
    ]
    title = f"{label(row.policy)}: {name}"
    legend = line_legend([(line.name, line.style) for line in lines], has_marks=False)
    return _figure(
        title, legend, line_chart(f"{title} over time", lines, (Axis(unit[0]), Axis(name)), SIZE, has_marks=False)
    )


def _time_table(row: Row) -> Element:
    heads = [name for name, _ in (*_SESSIONS, *_BLOCKS)]
    cells = [
        [
            span(moment.time_s),
            *[count(value(moment)) for _, value in (*_SESSIONS, *_BLOCKS)],
            count(moment.references),
            count(moment.hits),
        ]
        for moment in row.moments
    ]
    return table(f"{label(row.policy)} over time", ["until", *heads, "references", "hits"], cells)


def _figure(name: str, *children: Element) -> Element:
    return element("figure", {}, element("figcaption", {}, name), *children)


def _unit(longest_s: float) -> tuple[str, float]:
    """Return the unit of a time axis, and its seconds."""
    return next((unit for unit in _UNITS if longest_s >= 2 * unit[1]), _UNITS[-1])


def _upto(bucket: Bucket) -> str:
    return "longer" if bucket.upto is None else span(bucket.upto)


def _shares(row: Row) -> list[float]:
    """Return, for each bucket, the share of the evicted references that is in it or in an earlier one."""
    counts = [bucket.count for bucket in row.misses.ages]
    return [sum(counts[: number + 1]) / sum(counts) for number in range(len(counts))]
