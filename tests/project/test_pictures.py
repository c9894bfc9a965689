"""The pictures of the documents are what their script draws, and are shown somewhere."""

import runpy
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"


def test_the_pictures_are_what_the_script_draws():
    script = runpy.run_path(str(ROOT / "tools" / "draw_pictures.py"))
    drawn = script["files"]()
    assert {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")} == drawn
    for svg in drawn.values():
        ET.fromstring(svg)


def test_every_picture_is_shown():
    pages = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    unseen = [path.name for path in FOLDER.glob("*.svg") if f"pictures/{path.name}" not in pages]
    assert not unseen, f"expected each picture of docs/pictures to be shown in a page, got none for {unseen}"
