"""Who asks of which kind a group of layers is: nobody but the kinds themselves. What differs, a kind answers."""

import re
from pathlib import Path

from kvblocks.core.kinds import Group, RecurrentState

ROOT = Path(__file__).resolve().parents[2] / "kvblocks"
OWN = [kind for kind in Group.__subclasses__() if kind.__module__ == Group.__module__]
# States in slots are a component of their own, so who makes slots or memory for them asks whether a group is one.
KINDS = "|".join(kind.__name__ for kind in OWN if kind is not RecurrentState)
SIZES = "window|chunk_size|window_tokens|chunk_tokens"
ASKS = re.compile(rf"\b(?:{SIZES}) is (?:not )?None|isinstance\([^()]*\b(?:{KINDS})\b")
KNOWS = "core/kinds.py"


def questions() -> dict[str, list[str]]:
    """By file, the lines that ask."""
    files = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    found = {name: [line.strip() for line in text.splitlines() if ASKS.search(line)] for name, text in files.items()}
    return {name: lines for name, lines in found.items() if lines}


def test_nobody_asks_a_group_for_its_kind():
    assert {name: lines for name, lines in questions().items() if name != KNOWS} == {}


def test_the_question_would_be_found():
    assert ASKS.search("        return side_group.window is None")
    assert ASKS.search("if group.window is not None:")
    assert ASKS.search("single = isinstance(groups[0], FullAttention)")
    assert ASKS.search("return FullAttention(size) if window is None else SlidingWindow(size, window)")
    assert KNOWS in questions()
