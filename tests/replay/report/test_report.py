"""The report: whatever a replay finds can be shown, and nothing of a trace becomes markup."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from replay.results import NASTY, make_result, results

from kvblocks.replay.report import render_report, style_sheet
from kvblocks.replay.report.axes import spread, ticks
from kvblocks.replay.report.markup import count, label, percent, short, span
from kvblocks.replay.result import PrefixNode

VOID = {"meta"}
TAGS = (
    {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "header",
        "main",
        "footer",
        "nav",
        "section",
        "figure",
        "figcaption",
    }
    | {"h1", "h2", "h3", "p", "a", "ul", "li", "dl", "dt", "dd", "div", "details", "summary"}
    | {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    | {"svg", "defs", "pattern", "g", "rect", "line", "path", "text"}
)
ATTRIBUTES = (
    {"class", "id", "href", "lang", "charset", "name", "content", "scope", "tabindex", "role", "open"}
    | {"aria-label", "aria-hidden", "viewBox", "width", "height", "x", "y", "x1", "x2", "y1", "y2", "d", "fill"}
    | {"transform", "stroke-dasharray", "text-anchor", "patternUnits"}
)


class Page(HTMLParser):
    """Reads a report as a browser would, and keeps what it is made of."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag in TAGS
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def words(self) -> str:
        return "\n".join(self.texts)


def read(html: str) -> Page:
    """Read a report; fails for elements, attributes and links that no report has."""
    page = Page(html)
    allowed = {name.lower() for name in ATTRIBUTES}
    for _, attributes in page.elements:
        assert attributes.keys() <= allowed
        assert re.fullmatch(r"#[a-z-]+|", attributes.get("href", ""))
        assert re.fullmatch(r"url\(#pattern[0-6]\)|", attributes.get("fill", ""))
        assert not any("NaN" in value or "inf" in value for key, value in attributes.items() if key != "aria-label")
    assert "@import" not in html
    assert "url(" not in html.split("</style>", maxsplit=1)[0]
    return page


@given(result=results)
@settings(max_examples=30, deadline=None)
def test_whatever_a_replay_finds_can_be_shown(result):
    read(render_report(result))


@pytest.mark.parametrize("name", NASTY)
def test_names_of_a_trace_are_texts(name, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(render_report(make_result(name)), encoding="utf-8")
    page = read(path.read_text(encoding="utf-8"))
    assert label(name) in page.words


def test_a_session_named_as_a_script_is_shown():
    html = render_report(make_result("<script>alert(1)</script>"))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "script" not in {tag for tag, _ in read(html).elements}


def test_the_numbers_behind_the_figures_are_there():
    result = make_result()
    words = read(render_report(result)).words
    for row in result.rows:
        shown = [percent(row.hit_rate), percent(row.bound), percent(row.attainable or 0), span(row.waits.p99_s)]
        shown += [count(row.tokens.computed), count(row.tokens.saved), count(row.misses.first_time)]
        shown += [count(row.num_blocks), row.policy, count(row.misses.own_session), count(row.misses.other_tenant)]
        assert [words.count(text) > 0 for text in shown] == [True] * len(shown)
    for name in (
        "Hit rate",
        "Tokens computed and saved",
        "Waiting",
        "Where misses come from",
        "Over time",
        "Prefix structure",
    ):
        assert name in words


def test_every_figure_has_a_name_and_a_table():
    page = read(render_report(make_result()))
    pictures = [attributes for tag, attributes in page.elements if tag == "svg" and "aria-hidden" not in attributes]
    assert len(pictures) > 10
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in pictures)
    assert sum(tag == "caption" for tag, _ in page.elements) == sum(tag == "table" for tag, _ in page.elements) >= 8


def test_parts_and_lines_differ_in_more_than_colour():
    page = read(render_report(make_result()))
    dashes, patterns = {}, {}
    last = ""
    for tag, attributes in page.elements:
        kind = attributes.get("class", "")
        if tag == "path" and kind.startswith("line s"):
            dashes.setdefault(kind, set()).add(attributes.get("stroke-dasharray"))
        if tag == "rect" and kind.startswith("part s"):
            last = kind
        if tag == "rect" and "fill" in attributes:
            patterns.setdefault(last, set()).add(attributes["fill"])
    for found in (dashes, patterns):
        assert len(found) >= 2
        assert all(len(values) == 1 for values in found.values())
        assert len(set.union(*found.values())) == len(found)


def test_the_icicle_is_as_wide_as_requests_and_as_high_as_blocks():
    wide = PrefixNode(0, 10, 60, 5, "5 sessions", children=[PrefixNode(10, 30, 20, 1, "a")])
    root = PrefixNode(0, 0, 80, 6, "all", children=[wide, PrefixNode(0, 40, 20, 1, "b")])
    page = read(render_report(replace(make_result(), prefixes=root)))
    start = max(i for i, (_, had) in enumerate(page.elements) if had.get("aria-label", "").startswith("The prefix"))
    rects = [had for tag, had in page.elements[start:] if tag == "rect" and had.get("class", "").startswith("part")]
    left, below, right = sorted(((float(r["x"]), float(r["y"])), float(r["width"]), float(r["height"])) for r in rects)
    assert left[1] == pytest.approx(3 * below[1], rel=0.01)
    assert below[1] == pytest.approx(right[1], rel=0.01)
    assert below[2] == pytest.approx(3 * left[2], rel=0.01)
    assert right[2] == pytest.approx(4 * left[2], rel=0.01)
    assert right[0][0] == pytest.approx(left[0][0] + left[1], rel=0.01)
    assert below[0][1] == pytest.approx(left[0][1] + left[2], rel=0.01)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_from_the_page(scheme):
    """WCAG 2.2: 4.5 to 1 for texts, 3 to 1 for what pictures are made of."""
    roots = re.findall(r":root \{(.*?)\}", style_sheet("figures.css"), re.DOTALL)
    assert len(roots) == 2
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", roots[scheme]))
    page = luminance(colours["page"])
    for name, colour in colours.items():
        lighter, darker = sorted((luminance(colour), page), reverse=True)
        contrast = (lighter + 0.05) / (darker + 0.05)
        if name in ("ink", "faint", "s0"):
            assert contrast >= 4.5, name
        elif name not in ("page", "rule", "soft"):
            assert contrast >= 3.0, name


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (short(950), "950"),
        (short(1234), "1.2k"),
        (short(34_000), "34k"),
        (short(5_600_000), "5.6M"),
        (span(0), "0 s"),
        (span(0.03), "30 ms"),
        (span(1.5), "1.5 s"),
        (span(720), "12 min"),
        (span(12_600), "3.5 h"),
        (percent(0.4567), "45.7 %"),
        (count(12_345.4), "12,345"),
        (label("a" * 80), "a" * 59 + "…"),
        (label("\ud800"), "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_numbers_and_names_as_people_read_them(shown, expected):
    assert shown == expected


def test_ticks_are_round_and_few():
    assert ticks(0, 100, 5) == [0, 20, 40, 60, 80, 100]
    assert ticks(3, 3, 5) == [3]
    assert ticks(0, 0.7, 5) == pytest.approx([0, 0.2, 0.4, 0.6])


def test_labels_are_moved_apart():
    assert spread([10, 11, 50], 15, 0, 100) == [10, 25, 50]
    assert spread([98, 99], 15, 0, 100) == [85, 100]


def test_a_policy_that_failed_is_named():
    result = make_result()
    assert "Warning" not in read(render_report(result)).words
    rows = [replace(row, num_policy_failures=7) if row.policy == "lru" else row for row in result.rows]
    assert "Warning: lru raised" in read(render_report(replace(result, rows=rows))).words
