# a line of a picture is a line here
"""The picture of all packages in their layers."""

import tomllib
from pathlib import Path

from picture import Picture

ROOT = Path(__file__).resolve().parents[1]

NOTES = {
    "__main__": "python -m kvblocks",
    "cli": "the command line",
    "server": "OpenAI's API over the reference engine",
    "engine": "built on public names only",
    "gate": "turns of sessions; others' formats, and their transport",
    "metrics": "hit rates, and how long blocks live",
    "manager": "KVCacheManager, the facade; PrefixCache, for other allocators",
    "observe": "what people look at: events, why a prompt missed, pictures",
    "tiers": "what is kept below the device",
    "retention": "what stays: pins, quotas, holds, policies",
    "core": "block tables with exact prefix caching: begin here",
    "hashing": "extra keys and digests",
    "arguments": "what can go wrong, records, checks",
    "kernels": "tensors; the engine calls them through a few modules",
}
"""What is in each layer, by the first of its packages."""

LIBRARY = "gate"
"""The highest layer of the library."""


def layers() -> Picture:
    """All packages in their layers, from the contract in pyproject.toml."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    listed: list[str] = next(one["layers"] for one in config["contracts"] if one["type"] == "layers")
    rows = [layer.replace("|", ":").split(" : ") for layer in listed]
    picture = Picture("The packages of kvblocks in their layers", 62 + 27 * len(rows))
    picture.text(20, 28, "A package imports from the layers below its own", "bold")
    fill, y = "own", 44
    for packages in rows:
        if packages[0] == LIBRARY:
            picture.arrow((20, y + 3), (740, y + 3), dash=True, tip=False)
            picture.text(740, y - 3, "below this line: the library", "small", "end")
            fill, y = "shared", y + 10
        if packages[0] == "kernels":
            fill = "empty"
        x = 20
        for package in packages:
            label = package if (ROOT / "kvblocks" / package).is_dir() else f"{package}.py"
            width = 14 + round(6.5 * len(label))
            picture.box(x, y, width, label, fill, 20)
            x += width + 6
        picture.text(max(400, x + 6), y + 14, NOTES[packages[0]], "small")
        y += 27
    return picture
