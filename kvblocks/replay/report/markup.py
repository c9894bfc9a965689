"""Elements of HTML and SVG, made so that nothing in a trace can become markup.

Texts and attributes enter a page only through `xml.etree` elements, which escape them. Markup is never built from
strings.
"""

from xml.etree import ElementTree as ET

Element = ET.Element
Attribute = str | int | float
Attributes = dict[str, Attribute]
_REPLACED = "\N{REPLACEMENT CHARACTER}"
MAX_LABEL = 60


def element(tag: str, attributes: Attributes | None = None, *children: Element | str) -> Element:
    """Return an element with these attributes and children, which may be texts. Numbers are shortened."""
    made = Element(tag, {name: number(value) for name, value in (attributes or {}).items()})
    append(made, *children)
    return made


def append(parent: Element, *children: Element | str) -> None:
    """Append elements and texts to an element."""
    for child in children:
        if not isinstance(child, str):
            parent.append(child)
        elif len(parent):
            parent[-1].tail = (parent[-1].tail or "") + child
        else:
            parent.text = (parent.text or "") + child


def to_html(root: Element) -> str:
    """Return a complete HTML document as text."""
    return "<!doctype html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"


def label(text: str) -> str:
    """Make a name from a trace fit for display: printable, and at most one line.

    Control characters, lone surrogates, and characters that change the direction of text aren't printable.
    """
    shown = "".join([letter if letter.isprintable() else _REPLACED for letter in text[: MAX_LABEL + 1]])
    return shortened(shown, MAX_LABEL)


def shortened(text: str, most: int) -> str:
    """Return a text, or its beginning and an ellipsis, with at most `most` letters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def number(value: Attribute) -> str:
    """Return a number in SVG's form, with at most two decimals. A text stays as it is."""
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else str(int(value))


def percent(share: float) -> str:
    """Return a share in percent: 0.4567 is 45.7 %."""
    return f"{100 * share:.1f} %"


def count(value: float) -> str:
    """Return a large number with separators, such as 12,345."""
    return f"{value:,.0f}"


def short(value: float) -> str:
    """Return a number in about four characters: 950, 1.2k, 34k, 5.6M."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            shown = f"{value / unit:.1f}" if abs(value) < 10 * unit else f"{value / unit:.0f}"
            return shown.removesuffix(".0") + letter
    return f"{value:.3g}" if value < 10 else f"{value:.0f}"


def span(seconds: float) -> str:
    """Return a duration with a fitting unit, such as 20 ms, 5 s, 12 min or 3.5 h."""
    if 0 < seconds < 0.95:
        return f"{max(seconds * 1000, 1):.0f} ms"
    if seconds < 90:
        return f"{seconds:.1f} s" if 0 < seconds < 10 and seconds % 1 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.3g} h"


def table(caption: str, heads: list[str], rows: list[list[str]]) -> Element:
    """Return a table in a frame that scrolls if the table is wider than the page.

    heads: the heads of the columns. rows: the first cell of each is its head.
    """
    head = element("tr", {}, *[element("th", {"scope": "col"}, text) for text in heads])
    body = [
        element("tr", {}, element("th", {"scope": "row"}, cells[0]), *[element("td", {}, cell) for cell in cells[1:]])
        for cells in rows
    ]
    made = element(
        "table", {}, element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, *body)
    )
    return element("div", {"class": "scroll", "tabindex": 0, "role": "region", "aria-label": caption}, made)


def fold(summary: str, *children: Element | str, is_open: bool = False) -> Element:
    """Return an element that a reader can open and close."""
    attributes: Attributes = {"open": "open"} if is_open else {}
    return element("details", attributes, element("summary", {}, summary), *children)
