"""The sections of a report, each with a figure, its explanation, and its numbers."""

from kvblocks.replay.report.charts import Kind, Line, for_both, part_legend
from kvblocks.replay.report.icicle import KINDS, icicle, walk
from kvblocks.replay.report.markup import Element, count, element, fold, label, percent, short, span, table
from kvblocks.replay.report.rows import (
    by_size,
    grid,
    policies,
    policy_legend,
    rate_chart,
    row_bars,
    row_table,
    size_name,
)
from kvblocks.replay.report.small_charts import age_chart, age_table, runs_over_time
from kvblocks.replay.result import Result, Row

TOKEN_KINDS = [Kind("saved on the device", 0), Kind("loaded from the host", 1), Kind("computed", 5)]
WAIT_KINDS = [Kind("ran at once", 0), Kind("waited", 1), Kind("refused", 4)]
MISS_KINDS = [
    Kind("first time", 0),
    Kind("evicted for the same session", 1),
    Kind("evicted for another session", 2),
    Kind("evicted for another tenant", 3),
    Kind("dropped", 4),
    Kind("refused", 5),
    Kind("out of windows", 6),
]


def section(title: str, *children: Element | str) -> Element:
    """Return a section of the page."""
    return element("section", {}, element("h2", {}, title), *children)


def paragraph(words: str) -> Element:
    """Return a paragraph."""
    return element("p", {}, words)


def hit_rates(result: Result) -> Element:
    """The section of hit rates by policy and size, with both optima."""
    groups = by_size(result.rows)
    lines = [
        Line(
            label(name),
            [(row.num_blocks, row.hit_rate) for rows in groups for row in rows if row.policy == name],
            style,
        )
        for name, style in policies(result.rows).items()
    ]
    known = [(float(row.num_blocks), row.attainable) for row, *_ in groups if row.attainable is not None]
    if known:
        lines.append(Line("attainable", known, "attainable"))
    bounds = [(float(group[0].num_blocks), max(row.bound for row in group)) for group in groups]
    lines.append(Line("bound", bounds, "bound"))
    return section(
        "Hit rate",
        paragraph("The share of all block references that were found, on the device or in the host tier."),
        element(
            "dl",
            {},
            element("dt", {}, "bound"),
            element(
                "dd",
                {},
                "MIN with bypass on single blocks, for the order in which a run admitted its requests: no policy can "
                "hit more in that order. Each run has a bound of its own; the line shows the highest.",
            ),
            element("dt", {}, "attainable"),
            element(
                "dd",
                {},
                "The best schedule that was found with the future known, leaf-first and with holds. It is no bound: "
                "another may be better still.",
            ),
        ),
        rate_chart("Hit rate by size and policy", lines),
        _rate_table(result),
        *_failures(result),
        row_table(
            "Each run",
            ["hit rate", "on the device", "bound", "evicted blocks", "failures of the policy", "run in"],
            result,
            lambda row: [
                *[percent(rate) for rate in (row.hit_rate, row.device_hit_rate, row.bound)],
                count(row.num_evicted),
                count(row.num_policy_failures),
                span(row.wall_s),
            ],
        ),
        *([_fixed_order(result)] if any(row.fixed_order for row in result.rows) else []),
    )


def tokens(result: Result) -> Element:
    """The section of computed and saved tokens."""
    return section(
        "Tokens computed and saved",
        paragraph("Prompt tokens of the requests that ran. What is not computed was found, or loaded from the host."),
        row_bars("Prompt tokens", result, TOKEN_KINDS, _token_parts, lambda row: f"{short(row.tokens.saved)} saved"),
        row_table(
            "Prompt tokens of each run",
            ["prompt", "computed", "saved", "of these loaded", "share saved"],
            result,
            lambda row: [
                *[count(n) for n in (row.tokens.prompt, row.tokens.computed, row.tokens.saved, row.tokens.loaded)],
                percent(row.tokens.saved / max(1, row.tokens.prompt)),
            ],
        ),
    )


def waits(result: Result) -> Element:
    """The section of waiting times."""
    if not any(row.waits.count or row.waits.refused for row in result.rows):
        figure = paragraph("No request waited or was refused, in any run.")
    else:
        figure = row_bars("Requests", result, WAIT_KINDS, lambda row: _wait_parts(result, row), _wait_remark)
    return section(
        "Waiting",
        paragraph(
            "A request holds its blocks from its admission until it ends. One that does not fit waits; one that is "
            "larger than the pool is refused. Means are over all requests that ran."
        ),
        figure,
        row_table(
            "Waits of each run",
            ["waited", "mean", "99th percentile", "longest", "refused"],
            result,
            lambda row: [
                count(row.waits.count),
                *[span(seconds) for seconds in (row.waits.mean_s, row.waits.p99_s, row.waits.max_s)],
                count(row.waits.refused),
            ],
        ),
    )


def misses(result: Result) -> Element:
    """The section of misses: for whom the blocks were evicted, and how long before."""
    styles = policies(result.rows)
    return section(
        "Where misses come from",
        paragraph(
            "References that were not found. First time: no request had the block before, so no cache could have it. "
            "Evicted: the block was cached, and made room for the same session, another session or another tenant. "
            "Dropped: it was given up at its session's end, or by the policy. Refused: the request is larger than the "
            "pool. Out of windows: the block was cached, but windows had lost what the next token sees."
        ),
        row_bars("Missed references", result, MISS_KINDS, _miss_parts, lambda row: short(sum(_miss_parts(row)))),
        row_table(
            "Missed references of each run",
            [kind.name for kind in MISS_KINDS],
            result,
            lambda row: [count(part) for part in _miss_parts(row)],
        ),
        element("h3", {}, "How long after the eviction"),
        paragraph(
            "References to blocks that had been evicted: the share for which the eviction was at most so long ago."
        ),
        policy_legend(result.rows, styles),
        grid([age_chart(rows, styles) for rows in by_size(result.rows)]),
        fold("Numbers", age_table(by_size(result.rows))),
    )


def over_time(result: Result) -> Element:
    """The section of sessions, requests, blocks and hits over time."""
    groups = by_size(result.rows)
    styles = policies(result.rows)
    made = [
        fold(size_name(group[0]), *runs_over_time(group, styles), is_open=number == len(groups) // 2)
        for number, group in enumerate(groups)
    ]
    return section(
        "Over time",
        paragraph("A part for each size. A session lives from its first request to the end of its last."),
        *made,
    )


def prefixes(result: Result) -> Element:
    """The section of the prefix structure."""
    root = result.prefixes
    hidden = sum(node.num_hidden_references for node in walk(root)) / max(1, result.trace.num_references)
    runs = sorted(walk(root), key=lambda node: -node.num_blocks * node.num_requests)[:20]
    rows = [
        [
            label(node.label),
            count(node.depth),
            count(node.num_blocks),
            count(node.num_requests),
            count(node.num_sessions),
            count(node.num_blocks * node.num_requests),
        ]
        for node in runs
        if node.num_blocks
    ]
    heads = ["run", "blocks above", "blocks", "requests", "sessions", "references"]
    return section(
        "Prefix structure",
        paragraph(
            "All prompts as one tree. A rectangle is a run of blocks: as wide as the share of the requests that have "
            "it, as high as it has blocks, so that its area is its share of the references. What hangs below a "
            "rectangle continues it. Runs of very few requests are left out"
            + (f", and with them {percent(hidden)} of the references." if hidden else ".")
        ),
        part_legend(KINDS),
        for_both(lambda width: icicle(root, width)),
        fold("Numbers", table("The runs with the most references", heads, rows)),
    )


def _rate_table(result: Result) -> Element:
    """Return the hit rates: a line for each size, a column for each policy."""
    names, lines = list(policies(result.rows)), []
    for rows in by_size(result.rows):
        found = {row.policy: row.hit_rate for row in rows}
        bounds = sorted({percent(row.bound) for row in rows}, key=lambda shown: float(shown.split()[0]))
        lines.append(
            [
                size_name(rows[0]),
                *[percent(found[name]) if name in found else "" for name in names],
                _rate(rows[0].attainable),
                " to ".join([bounds[0], bounds[-1]] if len(bounds) > 1 else bounds),
            ]
        )
    return table("Hit rates", ["size", *map(label, names), "attainable", "bound"], lines)


def _failures(result: Result) -> list[Element]:
    """Return a warning of policies that failed, if any did."""
    failed = policies(row for row in result.rows if row.num_policy_failures)
    names = ", ".join(label(name) for name in failed)
    words = "raised, or named no usable block. The least recently used block was evicted instead. See the numbers."
    return [element("p", {"class": "warning"}, f"Warning: {names} {words}")] if failed else []


def _fixed_order(result: Result) -> Element:
    """Return the hit rates where no request waits, so that all ran in one order."""
    found = [(row, row.fixed_order) for rows in by_size(result.rows) for row in rows if row.fixed_order is not None]
    lines = [
        Line(label(name), [(row.num_blocks, fixed.hit_rate) for row, fixed in found if row.policy == name], style)
        for name, style in policies(result.rows).items()
    ]
    attainable = {row.num_blocks: fixed.attainable for row, fixed in found if fixed.attainable is not None}
    if attainable:
        lines.append(Line("attainable", list(attainable.items()), "attainable"))
    lines.append(Line("bound", list({row.num_blocks: fixed.bound for row, fixed in found}.items()), "bound"))
    cells = [
        [size_name(row), label(row.policy), *[_rate(rate) for rate in (fixed.hit_rate, fixed.attainable, fixed.bound)]]
        for row, fixed in found
    ]
    heads = ["size", "policy", "hit rate", "attainable", "bound"]
    return element(
        "div",
        {},
        element("h3", {}, "One order for all"),
        paragraph(
            "The same runs, except that no request waits: all are admitted when they come. One that does not fit is "
            "served outside the pool. The order is the same for all policies and sizes, so these rates compare "
            "policies and nothing else."
        ),
        rate_chart("Hit rate by size and policy, in one order", [line for line in lines if line.points]),
        fold("Numbers", table("Hit rates in one order", heads, cells)),
    )


def _rate(share: float | None) -> str:
    return "" if share is None else percent(share)


def _token_parts(row: Row) -> list[float]:
    return [row.tokens.saved - row.tokens.loaded, row.tokens.loaded, row.tokens.computed]


def _wait_parts(result: Result, row: Row) -> list[float]:
    num_waited, num_refused = row.waits.count, row.waits.refused
    return [result.trace.num_requests - num_waited - num_refused, num_waited, num_refused]


def _wait_remark(row: Row) -> str:
    return f"mean {span(row.waits.mean_s)}"


def _miss_parts(row: Row) -> list[float]:
    missed = row.misses
    whom = [missed.own_session, missed.other_session, missed.other_tenant]
    return [missed.first_time, *whom, missed.dropped, missed.refused, missed.window]
