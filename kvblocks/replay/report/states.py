"""The report of a comparison of designs for recurrent states: one HTML file, like the report of a replay."""

from kvblocks.replay.report import page, trace_facts
from kvblocks.replay.report.charts import Bar, Kind, bar_chart, for_both, part_legend
from kvblocks.replay.report.markup import count, element, label, percent, short, span, table
from kvblocks.replay.report.sections import paragraph, section
from kvblocks.replay.states import DESIGNS, StateResult, StateRow

KINDS = [Kind("hit", 0), Kind("K and V cached, but no state", 4), Kind("not cached", 5)]


def render_states(result: StateResult) -> str:
    """Return the report as an HTML document. O(rows)."""
    used, groups = result.conditions, rows_by_size(result)
    names = dict.fromkeys(row.design for row in result.rows)
    heads = ["memory", "design", "hit", "K and V cached", "states saved", "saves without room", "run in"]
    lines = [[size, row.design, *_cells(row)] for size, rows in groups for row in rows]
    bars = [(size, [_bar(row) for row in rows]) for size, rows in groups]
    parts = [
        (
            "hit-rate",
            "Hit rate",
            section(
                "Hit rate",
                paragraph(
                    "The prompts' tokens. K and V after the last state are of no use: no prompt can go on from there."
                ),
                element(
                    "figure",
                    {},
                    part_legend(KINDS),
                    for_both(lambda width: bar_chart("Prompt tokens by design", bars, KINDS, width)),
                ),
                table("Each run", heads, lines),
            ),
        ),
        (
            "designs",
            "Designs",
            section(
                "Designs",
                element(
                    "dl",
                    {},
                    *[part for name in names for part in (element("dt", {}, name), element("dd", {}, DESIGNS[name]))],
                ),
            ),
        ),
    ]
    arrivals = "arrivals as recorded"
    if used.mean_arrival_s is not None:
        arrivals = f"sessions begin at random, {span(used.mean_arrival_s)} apart in the mean (seed {used.seed})"
    build = "compiled" if used.compiled else "not compiled"
    facts = [
        *trace_facts(result.trace),
        ("bytes of K and V a token", count(used.kv_bytes)),
        ("bytes of a state", short(used.state_bytes)),
    ]
    conditions = (
        f"{label(result.trace.name)}, in the format {label(result.trace.source_format)}; {arrivals}; requests one after"
        f" another, without answers. kvblocks {label(used.version)}, {build}, with Python {label(used.python)}."
    )
    return page(f"Recurrent states: {label(result.trace.name)}", facts, parts, conditions)


def rows_by_size(result: StateResult) -> list[tuple[str, list[StateRow]]]:
    """Return the name of each size, such as "60 GB", with its rows, in their order."""
    sizes: dict[int, list[StateRow]] = {}
    for row in result.rows:
        sizes.setdefault(row.num_bytes, []).append(row)
    return [(f"{size / 1e9:,.4g} GB", rows) for size, rows in sizes.items()]


def _bar(row: StateRow) -> Bar:
    parts = [row.num_hit, row.num_cached - row.num_hit, row.num_tokens - row.num_cached]
    return Bar(row.design, [float(part) for part in parts], percent(row.hit_rate))


def _cells(row: StateRow) -> list[str]:
    return [
        percent(row.hit_rate),
        percent(row.num_cached / max(1, row.num_tokens)),
        count(row.num_saved),
        count(row.num_without_room),
        span(row.wall_s),
    ]
