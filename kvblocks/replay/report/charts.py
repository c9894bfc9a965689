"""Lines, stacked bars and legends, as SVG.

Things that a reader must tell apart differ not only in color: lines also differ in marks and dashes, parts of bars in
patterns. Colors are CSS classes, which `figures.css` defines for light and dark.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvblocks.replay.report.axes import Frame, Scale, round_up, spread, text, ticks, width_of, x_axis, y_axis
from kvblocks.replay.report.markup import Attributes, Element, element, number, percent, short, shortened

NUM_STYLES = 7
"""How many different colors, marks, dashes and patterns there are. After that they repeat."""
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "9 2 2 2 2 2")
NARROW, WIDE = 350, 860
"""The widths of pictures for phones and for larger screens, in pixels."""


@dataclass(frozen=True)
class Line:
    """A line of a chart. style: the number of its color, mark and dash, or a CSS class."""

    name: str
    points: list[tuple[float, float]]
    style: int | str


@dataclass(frozen=True)
class Axis:
    """An axis: its name, its ticks (None: the chart chooses them), how numbers are written, and where it begins.

    low: where a vertical axis begins.
    """

    name: str
    values: list[float] = field(default_factory=list)
    is_log: bool = False
    shown: Callable[[float], str] = short
    low: float = 0.0


@dataclass(frozen=True)
class Kind:
    """A kind of parts of bars: its name, and the number of its color and pattern."""

    name: str
    style: int


@dataclass(frozen=True)
class Bar:
    """A stacked bar: its name, the sizes of its parts (one for each kind), and the text after it."""

    name: str
    parts: list[float]
    remark: str


def picture(name: str, width: float, height: float, children: Iterable[Element]) -> Element:
    """Return a separate SVG picture. name: read out by screen readers."""
    attributes: Attributes = {"viewBox": f"0 0 {number(width)} {number(height)}", "role": "img"}
    return element("svg", attributes | {"aria-label": name}, *children)


def for_both(draw: Callable[[int], Element]) -> Element:
    """Draw a picture for phones and one for larger screens. The page shows one of them."""
    narrow, wide = (
        element("div", {"class": kind}, draw(width)) for kind, width in (("narrow", NARROW), ("wide", WIDE))
    )
    return element("div", {}, narrow, wide)


def style_class(style: int | str) -> str:
    """Return the CSS class of a line's or a part's color."""
    return f"s{style % NUM_STYLES}" if isinstance(style, int) else style


def mark(x: float, y: float, style: int | str, title: str | None = None) -> Element:
    """Return the mark of a style at a point. Each style has its own shape."""
    shapes = (
        "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",  # circle
        "M-3.6,-3.6h7.2v7.2h-7.2z",  # square
        "M0,-4.8L4.6,3.6H-4.6z",  # triangle
        "M0,-5L5,0L0,5L-5,0z",  # diamond
        "M0,4.8L4.6,-3.6H-4.6z",  # triangle on its point
        "M-1.5,-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",  # plus
        "M-4.5,-1.5h9v3h-9z",  # bar
    )
    shape = shapes[style % NUM_STYLES if isinstance(style, int) else 0]
    place = f"translate({number(x)} {number(y)})"
    made = element("path", {"class": f"mark {style_class(style)}", "d": shape, "transform": place})
    if title is not None:
        made.append(element("title", {}, title))
    return made


def stroke(points: list[tuple[float, float]], style: int | str) -> Element:
    """Return a line through points given in pixels."""
    path = "M" + "L".join(f"{number(x)},{number(y)}" for x, y in points)
    attributes: Attributes = {"class": f"line {style_class(style)}", "d": path}
    if isinstance(style, int) and DASHES[style % NUM_STYLES]:
        attributes["stroke-dasharray"] = DASHES[style % NUM_STYLES]
    return element("path", attributes)


def line_chart(
    name: str, lines: list[Line], axes: tuple[Axis, Axis], size: tuple[int, int], *, has_marks: bool = True
) -> Element:
    """Return a chart of lines. axes: horizontal and vertical. size: width and height.

    If the picture is wide enough, a line's name is at its end. The caller adds the legend. O(points).
    """
    across, up = axes
    width, height = size
    has_names = has_marks and width >= WIDE
    widest = max((width_of(shortened(line.name, 14)) for line in lines), default=0.0) if has_names else 0.0
    frame = Frame(46.0, 26.0, width - 14.0 - widest, height - 42.0)
    xs = [x for line in lines for x, _ in line.points] or [0.0, 1.0]
    highest = max(up.values, default=0.0) or max((y for line in lines for _, y in line.points), default=0.0)
    y_scale = Scale(up.low, highest if up.values else round_up(highest or 1.0), frame.bottom, frame.top)
    x_scale = Scale(min(xs), max(xs), frame.left + 6, frame.right - 6, across.is_log)
    y_values = up.values or ticks(up.low, y_scale.high, 5)
    x_values = across.values or ticks(x_scale.low, x_scale.high, 6 if width >= WIDE else 4)
    children = [*y_axis(frame, y_scale, y_values, up.shown), *x_axis(frame, x_scale, x_values, across.shown)]
    children.append(text(2, 14, up.name, kind="name"))
    children.append(text((frame.left + frame.right) / 2, height - 6, across.name, "middle", "name"))
    for line in lines:
        placed = [(x_scale(x), y_scale(y)) for x, y in line.points]
        if len(placed) > 1:
            children.append(stroke(placed, line.style))
        if has_marks:
            said = [f"{line.name}, {across.shown(x)}: {up.shown(y)}" for x, y in line.points]
            children += [mark(x, y, line.style, told) for (x, y), told in zip(placed, said, strict=True)]
    if has_names:
        drawn = [line for line in lines if line.points]
        ends = spread([y_scale(line.points[-1][1]) for line in drawn], 15.0, frame.top, frame.bottom)
        for line, y in zip(drawn, ends, strict=True):
            children.append(text(frame.right + 8, y + 4, shortened(line.name, 14)))
    return picture(name, width, height, children)


def part(x: float, y: float, size: tuple[float, float], style: int, title: str) -> Element:
    """Return a part of a bar: a rectangle with color, pattern and title."""
    at: Attributes = {"x": x, "y": y, "width": size[0], "height": size[1]}
    plain = element("rect", at | {"class": f"part {style_class(style)}"})
    pattern = element("rect", at | {"fill": f"url(#pattern{style % NUM_STYLES})"})
    return element("g", {}, plain, pattern, element("title", {}, title))


def bar_chart(name: str, groups: list[tuple[str, list[Bar]]], kinds: list[Kind], width: int) -> Element:
    """Return horizontal bars in groups, all on one scale. groups: headings with their bars. O(parts)."""
    bars = [bar for _, members in groups for bar in members]
    left = max((width_of(_bar_name(bar)) for bar in bars), default=0.0) + 12
    room = width - left - max((width_of(bar.remark) for bar in bars), default=0.0) - 12
    scale = Scale(0.0, max((sum(bar.parts) for bar in bars), default=0.0) or 1.0, left, left + room)
    children, y = list[Element](), 0.0
    for heading, members in groups:
        children.append(text(2, y + 16, heading, kind="name"))
        y += 24.0
        for bar in members:
            children.append(text(left - 8, y + 13, _bar_name(bar), "end"))
            behind = 0.0
            for kind, size in zip(kinds, bar.parts, strict=True):
                x, behind = scale(behind), behind + size
                if scale(behind) - x > 0.05:
                    told = f"{bar.name}, {heading}. {kind.name}: {short(size)}, {percent(size / sum(bar.parts))}"
                    children.append(part(x, y, (scale(behind) - x, 18.0), kind.style, told))
            children.append(text(scale(behind) + 8, y + 13, bar.remark))
            y += 24.0
        y += 8.0
    return picture(name, width, y, children)


def _bar_name(bar: Bar) -> str:
    return shortened(bar.name, 14)


def line_legend(entries: list[tuple[str, int | str]], *, has_marks: bool = True) -> Element:
    """Return the names of lines, each after a sample of the line and its mark."""
    pieces = [(name, [stroke([(1, 8), (35, 8)], style), mark(18, 8, style)]) for name, style in entries]
    return _legend([(name, drawn if has_marks else drawn[:1]) for name, drawn in pieces])


def part_legend(kinds: list[Kind]) -> Element:
    """Return the names of bars' parts, each after a sample of the part."""
    return _legend([(kind.name, [part(4, 1, (28, 14), kind.style, kind.name)]) for kind in kinds])


def _legend(entries: list[tuple[str, list[Element]]]) -> Element:
    items = []
    for name, drawn in entries:
        key = element("svg", {"viewBox": "0 0 36 16", "width": 36, "height": 16, "aria-hidden": "true"}, *drawn)
        items.append(element("li", {}, key, name))
    return element("ul", {"class": "legend"}, *items)


def patterns() -> Element:
    """Return the fill patterns of bars' parts, once for the whole page. The first kind has none."""
    drawn = (
        "",
        "M0,8L8,0M-2,2L2,-2M6,10L10,6",  # lines that rise
        "M1,2h1M5,6h1",  # dots
        "M0,4H8",  # lines across
        "M4,0V8",  # lines down
        "M0,0L8,8M-2,6L2,10M6,-2L10,2",  # lines that fall
        "M0,0L8,8M0,8L8,0",  # a grid
    )
    made = []
    for index, path in enumerate(drawn):
        tile: Attributes = {"id": f"pattern{index}", "width": 8, "height": 8}
        line = element("path", {"class": "hatch", "d": path})
        made.append(element("pattern", tile | {"patternUnits": "userSpaceOnUse"}, line))
    defs = element("defs", {}, *made)
    return element("svg", {"width": 0, "height": 0, "class": "patterns", "aria-hidden": "true"}, defs)
