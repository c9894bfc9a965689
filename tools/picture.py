# ruff: noqa: E501  # a line of a picture is a line here
"""`Picture`: an SVG that is light on a light page and dark on a dark page."""

from xml.sax.saxutils import escape

WIDTH = 760
LIGHT = {
    "ground": "#fbfbf8",
    "text": "#1c1c1c",
    "faint": "#555555",
    "stroke": "#444444",
    "shared": "#bfe3c8",  # cached, and used by several
    "own": "#c6dafc",  # a sequence's own
    "new": "#ffe2a8",  # computed or taken now
    "empty": "#ffffff",
    "gone": "#e3e3e3",  # no longer held, or not needed
}
DARK = {
    "ground": "#1b1f27",
    "text": "#e8e8e4",
    "faint": "#aab0b8",
    "stroke": "#8f969f",
    "shared": "#2c6a42",
    "own": "#2f5290",
    "new": "#80591a",
    "empty": "#11141a",
    "gone": "#3d434c",
}
FILLS = ("shared", "own", "new", "empty", "gone")
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>{title}</title>
<style>svg {{ {colors} }}
{query}text {{ font: 13px system-ui, sans-serif; fill: var(--text) }} .small {{ font-size: 11px; fill: var(--faint) }}
.bold {{ font-weight: 600 }} .dark {{ fill: var(--text) }} .tip {{ fill: var(--stroke) }} .ground {{ fill: var(--ground) }}
.line {{ stroke: var(--stroke); stroke-width: 1.3; fill: none }} .dash {{ stroke-dasharray: 4 3 }}
{fills}</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">
<path d="M0 0 8 4 0 8z" class="tip"/></marker></defs>
<rect width="{width}" height="{height}" rx="8" class="ground"/>
"""


class Picture:
    """An SVG under construction. All lengths are in pixels, from the upper left corner."""

    def __init__(self, title: str, height: int, width: int = WIDTH) -> None:
        """Begin a picture."""
        self._title, self._height, self._width = title, height, width
        self.parts: list[str] = []

    def box(self, x: int, y: int, width: int, text: str, fill: str, height: int = 30) -> None:
        """Add a rectangle with a text in its middle. In a low rectangle the text is small."""
        if fill not in FILLS:
            raise ValueError(f"expected a fill of {FILLS}, got {fill!r}")
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" class="{fill}"/>\n')
        kind, drop = ("small dark", 4) if height < 30 else ("", 5)
        if text:
            self.text(x + width // 2, y + height // 2 + drop, text, kind, "middle")

    def text(self, x: int, y: int, text: str, kind: str = "", anchor: str = "start") -> None:
        """Add one line of text with its base line at y. kind: "", "small", "small dark" or "bold"."""
        self.parts.append(f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>\n')

    def arrow(self, *points: tuple[int, int], both: bool = False, dash: bool = False, tip: bool = True) -> None:
        """Add a line through the points, with a tip at its end, at both ends, or at none."""
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        start = ' marker-start="url(#tip)"' if both else ""
        end = ' marker-end="url(#tip)"' if tip else ""
        kind = "line dash" if dash else "line"
        self.parts.append(f'<path d="{path}" class="{kind}"{end}{start}/>\n')

    def svg(self, *, always_dark: bool = False) -> str:
        """Return the complete picture, in the colors that the page around it prefers, or always in the dark ones."""
        light, dark = (" ".join(f"--{name}: {color};" for name, color in colors.items()) for colors in (LIGHT, DARK))
        head = HEAD.format(
            width=self._width,
            height=self._height,
            title=escape(self._title),
            colors=dark if always_dark else light,
            query="" if always_dark else f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}\n",
            fills=" ".join(f".{fill} {{ fill: var(--{fill}); stroke: var(--stroke) }}" for fill in FILLS),
        )
        return "".join([head, *self.parts, "</svg>\n"])
