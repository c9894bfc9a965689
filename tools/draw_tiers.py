"""Draws hit rates over the sizes of device and host: `python tools/draw_tiers.py ROWS.json... --out docs/tiers.svg`.

The files are what `kvblocks replay TRACE --policies lru --host-size SIZE --json FILE` writes, one for each size of the
host tier and one without. A line is a size of the host. The picture is an SVG file of its own, for light and dark.
"""

import argparse
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from kvblocks.replay.report import style_sheet
from kvblocks.replay.report.charts import WIDE, Axis, Line, line_chart
from kvblocks.replay.report.markup import element

SIZE = (WIDE, 400)
RATES = [0.0, 0.1, 0.2, 0.3, 0.4]


def draw(rows: list[dict[str, Any]]) -> str:
    """Return the picture of a list of rows, those of one trace and one policy."""
    by_host: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_host.setdefault(row["conditions"]["host_blocks"] or 0, []).append(row)
    lines = []
    for style, (host, found) in enumerate(sorted(by_host.items())):
        found.sort(key=lambda row: row["num_blocks"])
        name = f"host {host / found[0]['trace']['num_unique_blocks']:.0%}" if host else "no host"
        lines.append(Line(name, [(100 * row["share"], row["hit_rate"]) for row in found], style))
    xs = sorted({x for line in lines for x, _ in line.points})
    across = Axis("blocks of the device, % of the unique blocks", xs, is_log=True, shown=lambda x: f"{x:.3g} %")
    up = Axis("hit rate", RATES, shown=lambda rate: f"{100 * rate:.0f} %")
    picture = line_chart("Hit rate by the sizes of device and host", lines, (across, up), SIZE)
    picture.set("xmlns", "http://www.w3.org/2000/svg")
    picture.insert(0, element("style", {}, style_sheet("figures.css")))
    picture.insert(1, element("rect", {"class": "plate", "width": SIZE[0], "height": SIZE[1]}))
    return ET.tostring(picture, encoding="unicode") + "\n"


def main() -> None:
    """Draw the rows of some files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = [row for path in options.rows for row in json.loads(path.read_text(encoding="utf-8"))]
    options.out.write_text(draw(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
