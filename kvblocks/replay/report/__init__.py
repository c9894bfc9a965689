"""The report of a replay: one HTML file that contains its pictures, without external links or scripts.

`markup` makes elements that escape their texts. `axes` and `charts` make pictures of them, `icicle` makes the picture
of the prefix structure, and `sections` makes the page with texts and tables. The page is readable without its style
sheet and without colors.
"""

from importlib.resources import files

from kvblocks.replay.report import sections
from kvblocks.replay.report.charts import patterns
from kvblocks.replay.report.markup import Attributes, Element, count, element, label, percent, span, to_html
from kvblocks.replay.result import Result, TraceFacts

__all__ = ["render_report", "style_sheet"]


def render_report(result: Result) -> str:
    """Return the report as an HTML document. O(size of the result)."""
    title = f"Replay of {label(result.trace.name)}"
    parts = [
        ("hit-rate", "Hit rate", sections.hit_rates(result)),
        ("tokens", "Tokens", sections.tokens(result)),
        ("waiting", "Waiting", sections.waits(result)),
        ("misses", "Misses", sections.misses(result)),
        ("time", "Over time", sections.over_time(result)),
        ("prefixes", "Prefixes", sections.prefixes(result)),
    ]
    return page(title, trace_facts(result.trace), parts, _conditions(result))


def page(title: str, facts: list[tuple[str, str]], parts: list[tuple[str, str, Element]], conditions: str) -> str:
    """Return an HTML document. facts: names and values. parts: for each section, its name in links, title and content.

    conditions: the last sentences of the page.
    """
    for name, _, section in parts:
        section.set("id", name)
    links = [element("li", {}, element("a", {"href": f"#{name}"}, words)) for name, words, _ in parts]
    navigation = element("nav", {"aria-label": "Sections"}, element("ul", {}, *links))
    head = element(
        "head",
        {},
        element("meta", {"charset": "utf-8"}),
        element("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element("title", {}, f"{title} - kvblocks"),
        element("style", {}, style_sheet("figures.css") + style_sheet("page.css")),
    )
    body = element(
        "body",
        {},
        patterns(),
        element("header", {}, element("h1", {}, title), _fact_list(facts), navigation),
        element("main", {}, *[section for _, _, section in parts]),
        element("footer", {}, element("p", {}, conditions)),
    )
    return to_html(element("html", {"lang": "en"}, head, body))


def style_sheet(name: str) -> str:
    """Return one of the two style sheets: "figures.css" or "page.css"."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def trace_facts(trace: TraceFacts) -> list[tuple[str, str]]:
    """Return the facts about a trace for the top of a page."""
    return [
        ("requests", count(trace.num_requests)),
        ("sessions", count(trace.num_sessions)),
        ("block references", count(trace.num_references)),
        ("unique blocks", count(trace.num_unique_blocks)),
        ("tokens in a block", count(trace.block_size)),
        ("duration", span(trace.duration_s)),
        ("infinite cache hits", percent(trace.infinite_hit_rate)),
    ]


def _fact_list(facts: list[tuple[str, str]]) -> Element:
    attributes: Attributes = {"class": "facts"}
    pairs = [element("div", {}, element("dt", {}, name), element("dd", {}, value)) for name, value in facts]
    return element("dl", attributes, *pairs)


def _conditions(result: Result) -> str:
    used, trace = result.conditions, result.trace
    arrivals = "arrivals as recorded"
    if used.mean_arrival_s is not None:
        arrivals = f"sessions begin at random, {span(used.mean_arrival_s)} apart in the mean (seed {used.seed})"
    loop = "a session's next request comes when the trace says"
    if used.closed_loop:
        loop = "a session waits its think time after one request ends, and then sends the next"
    tier = "no host tier" if used.host_blocks is None else f"a host tier of {count(used.host_blocks)} blocks"
    groups = "full attention" if used.groups is None else f"the layers of {label(used.groups)}"
    build = "compiled" if used.compiled else "not compiled"
    return (
        f"{label(trace.name)}, in the format {label(trace.source_format)}; {arrivals}; {loop}; {groups}; {tier}. "
        f"kvblocks {label(used.version)}, {build}, with Python {label(used.python)}."
    )
