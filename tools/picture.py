# ruff: noqa: E501  # a line of a picture is a line here
"""`Picture`: an SVG with a light ground of its own, so that it can be read on a dark page too."""

from xml.sax.saxutils import escape

WIDTH = 760
FILLS = {
    "shared": "#bfe3c8",  # cached, and used by several
    "own": "#c6dafc",  # a sequence's own
    "new": "#ffe2a8",  # computed or taken now
    "empty": "#ffffff",
    "gone": "#e3e3e3",  # no longer held, or not needed
    "note": "none",
}
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>{title}</title>
<style>text {{ font: 13px system-ui, sans-serif; fill: #1c1c1c }} .small {{ font-size: 11px; fill: #555 }}
.bold {{ font-weight: 600 }} .dark {{ fill: #1c1c1c }} .line {{ stroke: #444; stroke-width: 1.3; fill: none }} .dash {{ stroke-dasharray: 4 3 }}</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">
<path d="M0 0 8 4 0 8z" fill="#444"/></marker></defs>
<rect width="{width}" height="{height}" rx="8" fill="#fbfbf8"/>
"""


class Picture:
    """An SVG under construction. All lengths are in pixels, from the upper left corner."""

    def __init__(self, title: str, height: int, width: int = WIDTH) -> None:
        """Begin a picture."""
        self.parts = [HEAD.format(width=width, height=height, title=escape(title))]

    def box(self, x: int, y: int, width: int, text: str, fill: str, height: int = 30) -> None:
        """A rectangle with a text in its middle. In a low rectangle the text is small."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{FILLS[fill]}" stroke="#444"/>\n'
        )
        kind, drop = ("small dark", 4) if height < 30 else ("", 5)
        if text:
            self.text(x + width // 2, y + height // 2 + drop, text, kind, "middle")

    def text(self, x: int, y: int, text: str, kind: str = "", anchor: str = "start") -> None:
        """One line of text; y is its base line. kind: "", "small", "small dark" or "bold"."""
        self.parts.append(f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>\n')

    def arrow(self, *points: tuple[int, int], both: bool = False, dash: bool = False, tip: bool = True) -> None:
        """A line through the points, with a tip at its end, or at both, or none."""
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        start = ' marker-start="url(#tip)"' if both else ""
        end = ' marker-end="url(#tip)"' if tip else ""
        kind = "line dash" if dash else "line"
        self.parts.append(f'<path d="{path}" class="{kind}"{end}{start}/>\n')

    def svg(self) -> str:
        """The whole picture."""
        return "".join([*self.parts, "</svg>\n"])
