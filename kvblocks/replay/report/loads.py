"""The report of `kvblocks replay --gate`: delay by load, for each size of the pool."""

from collections.abc import Callable

from kvblocks.replay.report import page, trace_facts
from kvblocks.replay.report.charts import WIDE, Axis, Line, for_both, line_chart, line_legend
from kvblocks.replay.report.markup import Element, count, element, fold, label, percent, span, table
from kvblocks.replay.report.sections import paragraph, section
from kvblocks.replay.served.loads import LoadResult
from kvblocks.replay.served.run import Served

NAMES = {"none": "no gate", "cap": "best cap", "gate": "session gate", "infinite": "infinite cache"}
"""The lines of the charts, by the first word of an entrance's name."""


def render_loads(result: LoadResult) -> str:
    """Return the report as an HTML document. O(rows)."""
    sizes = list(dict.fromkeys(row.num_blocks for row in result.rows))
    parts = [(f"size-{number}", f"{count(size)} blocks", _size(result, size)) for number, size in enumerate(sizes)]
    title = f"Session gate: {label(result.trace.name)}"
    return page(title, trace_facts(result.trace), parts, _conditions(result))


def _size(result: LoadResult, num_blocks: int) -> Element:
    rows = [row for row in result.rows if row.num_blocks == num_blocks]
    tokens = count(num_blocks * result.trace.block_size)
    left_out = rows[0].num_left_out
    words = (
        f"A pool of {count(num_blocks)} blocks, which are {tokens} tokens. A session's delay is the time from its "
        "beginning to its end, without its pauses. The best cap is the number of sessions at once that had the least "
        "mean delay at this load; who runs a server doesn't know it beforehand."
    )
    if left_out:
        words += f" {count(left_out)} sessions have prompts that are too large for this pool, and are left out."
    return section(
        f"{count(num_blocks)} blocks",
        paragraph(words),
        _chart("Mean delay of a session", rows, "seconds", lambda row: row.delay_mean_s),
        _chart("Time to first token, 99th percentile", rows, "seconds", lambda row: row.ttft_p99_s),
        fold("Numbers", _table(rows), is_open=True),
    )


def _chart(name: str, rows: list[Served], unit: str, value: Callable[[Served], float]) -> Element:
    lines = []
    for style, (kind, words) in enumerate(NAMES.items()):
        points = sorted((row.load, value(row)) for row in rows if row.entrance.split()[0] == kind)
        if points:
            lines.append(Line(words, points, style))
    loads = sorted({row.load for row in rows})
    axes = Axis("load", loads, shown=lambda load: f"{load:g}"), Axis(unit)

    def draw(width: int) -> Element:
        return line_chart(name, lines, axes, (width, 360 if width >= WIDE else 300))

    legend = line_legend([(line.name, line.style) for line in lines])
    return element("figure", {}, element("h3", {}, name), legend, for_both(draw))


def _table(rows: list[Served]) -> Element:
    heads = ["load", "entrance", "delay mean", "median", "99th percentile", "first token median", "99th percentile"]
    heads += ["computed", "computed again", "longest wait", "paused", "hours"]
    lines = [
        [
            f"{row.load:g}",
            NAMES.get(row.entrance, row.entrance),
            *[span(each) for each in (row.delay_mean_s, row.delay_p50_s, row.delay_p99_s)],
            *[span(each) for each in (row.ttft_p50_s, row.ttft_p99_s)],
            *[percent(each) for each in (row.computed_share, row.recomputed_share)],
            span(row.longest_wait_s),
            count(row.num_paused),
            f"{row.hours:.1f}",
        ]
        for row in rows
    ]
    return table("Each run", heads, lines)


def _conditions(result: LoadResult) -> str:
    options, server = result.options, result.options.server
    arrivals = "arrivals as recorded"
    if options.mean_arrival_s is not None:
        arrivals = f"sessions begin at random, {span(options.mean_arrival_s)} apart in the mean (seed {options.seed})"
    tier = "no host tier" if options.host_blocks is None else f"a host tier of {count(options.host_blocks)} blocks"
    return (
        f"At load 1: {arrivals}. A session waits its think time after one request ends, and then sends the next. The "
        f"server computes {count(server.prefill_rate)} prompt tokens a second, and a step takes "
        f"{server.decode_step_s * 1000:g} ms without them; {tier}; eviction: least recently used first."
    )
