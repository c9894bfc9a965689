# ruff: noqa: E501  # a line of a picture is a line here
"""The picture of all rooms on their floors."""

import runpy
from pathlib import Path

from picture import Picture

ROOT = Path(__file__).resolve().parents[1]

TOP_FLOOR = 8
"""The highest floor of the manager. Above it, single modules are left out of the picture."""

NOTES = (
    "what can go wrong, records, checks",
    "extra keys and digests; what is said of layers; policies",
    "one group of full attention, and nothing else: begin here",
    "what stays: pins, quotas, holds, policies",
    "several groups of layers; what is kept below the device",
    "what people look at: events, why a prompt missed, pictures",
    "KVCacheManager, the facade; PrefixCache, for other allocators",
    "hit rates, and how long blocks live",
    "what `from kvblocks import ...` finds",
)
"""What is on each floor of the manager, from floor 0 on."""


def rooms() -> Picture:
    """All rooms on their floors, as tests/house/layering.py has them."""
    listed: dict[str, int] = runpy.run_path(str(ROOT / "tests" / "house" / "layering.py"))["FLOORS"]
    placed = {name: floor for name, floor in listed.items() if floor <= TOP_FLOOR or is_folder(name)}
    wings = {"around": (56, "new"), "engine": (384, "own"), "kernels": (640, "empty")}
    floors = sorted(set(placed.values()), reverse=True)
    rows = {floor: 24 * row + (0 if floor > TOP_FLOOR else 24) for row, floor in enumerate(floors)}
    bottom = 84 + 24 * len(rows)
    picture = Picture("The rooms of kvblocks on their floors", bottom + 34)
    picture.text(20, 28, "A room imports from the floors below it, and from its own folder", "bold")
    picture.text(56, 50, "formats, other engines, disks", "small")
    picture.text(384, 50, "reference engine", "small")
    for floor, y in rows.items():
        picture.text(34, y + 74, str(floor), "small", "end")
        ends = {wing: x for wing, (x, _) in wings.items()}
        for module in sorted(name for name, place in placed.items() if place == floor):
            wing = "around" if floor <= TOP_FLOOR else wing_of(module)
            label = label_of(module)
            width = 14 + round(6.5 * len(label))
            picture.box(ends[wing], y + 60, width, label, "shared" if floor <= TOP_FLOOR else wings[wing][1], 19)
            ends[wing] += width + 6
        if floor <= TOP_FLOOR:
            picture.text(max(380, ends["around"] + 6), y + 74, NOTES[floor], "small")
    line = rows[TOP_FLOOR] + 57
    picture.arrow((20, line), (740, line), dash=True, tip=False)
    picture.text(20, line - 7, "below this line: no input or output, clock, thread or torch", "small")
    picture.text(
        20,
        bottom + 18,
        "Paths are below kvblocks/, those of blue rooms but engine and cli below kvblocks/engine/. kernels/ is kvblocks/kernels by a link.",
        "small",
    )
    return picture


def is_folder(module: str) -> bool:
    """Whether a module is a package."""
    return (ROOT / module.replace(".", "/")).is_dir()


def wing_of(module: str) -> str:
    """Return the column of a room above the manager's floors."""
    room = module.split(".")[1]
    return {"engine": "engine", "cli": "engine", "kernels": "kernels"}.get(room, "around")


def label_of(module: str) -> str:
    """Return a room's path below kvblocks/, or below kvblocks/engine/ for rooms of the engine."""
    if module == "kvblocks":
        return "__init__.py"
    path = module.removeprefix("kvblocks.").replace(".", "/")
    for wing in ("engine/", "kernels/"):
        path = path.removeprefix(wing)
    return path if is_folder(module) else f"{path}.py"
