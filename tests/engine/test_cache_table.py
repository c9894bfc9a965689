"""The cached prefixes in the terminal: all that a row says, on any width, and markup taken literally."""

import io
from typing import Any

from rich.console import Console

from kvblocks import KVCacheManager, PrefixRow, Sequence
from kvblocks.engine.cache_table import cache_table


def show(rows: list[PrefixRow], width: int = 120, **options: Any) -> list[str]:
    """The lines of the table, as a terminal shows them."""
    screen = io.StringIO()
    Console(file=screen, width=width).print(cache_table(rows, **options))
    return screen.getvalue().splitlines()


def make_manager() -> KVCacheManager:
    manager = KVCacheManager(64, 4)
    for name, more in (("first", [1] * 8), ("second", [2] * 4)):
        sequence = Sequence(name, [*range(8), *more], salt="[bold]a[/bold]")
        manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
    manager.free(sequence)
    return manager


def test_a_row_tells_its_blocks_keys_and_tokens() -> None:
    lines = show(make_manager().inspect.prefix_rows())
    assert lines[0].strip() == "Cached prefixes: 5 blocks (4 owned, 1 free)"
    cells = [[cell.rstrip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [[cell.lstrip() for cell in row[1:]] for row in cells] == [
        ["2", "0", "2", "0", "salt '[bold]a[/bold]'", "0 1 2 3 4 5 6 7"],
        ["2", "0", "2", "0", "", "1 1 1 1 1 1 1 1"],
        ["1", "0", "0", "1", "", "2 2 2 2"],
    ]
    assert [row[0] for row in cells] == [" 0-7", "  8-15", "  8-11"]  # children are indented


def test_a_narrow_terminal_cuts_nothing_off() -> None:
    lines = [
        line.split("│")[1:-1] for line in show(make_manager().inspect.prefix_rows(), width=60) if line.startswith("│")
    ]
    keys, tokens = ["".join(line[column].strip() + " " for line in lines) for column in (5, 6)]
    assert keys.replace(" ", "") == "salt'[bold]a[/bold]'"
    assert tokens.split() == [*"01234567", *"11111111", *"2222"]


def test_rows_that_are_left_out_are_counted() -> None:
    rows = make_manager().inspect.prefix_rows()
    lines = show(rows, max_rows=1)
    last = [cell.strip() for cell in lines[-2].split("│")[1:-1]]
    assert last == ["2 rows left out", "3", "0", "2", "1", "", ""]
    assert show(rows, max_rows=3) == show(rows)
    assert not any("left out" in line for line in show(rows))
    assert sum(line.startswith("│") for line in lines) == 2


def test_an_empty_cache_says_so() -> None:
    assert show([])[0].strip() == "Nothing is cached"


def test_deep_rows_tell_their_depth_instead_of_leaving_the_screen() -> None:
    rows = [PrefixRow(index - 1 if index else None, index, index, 1, 1, 0, 0, (7,), ()) for index in range(300)]
    lines = [line for line in show(rows) if line.startswith("│")]
    assert len(lines) == 300
    assert lines[16].split("│")[1].rstrip() == " " * 17 + "16-16"
    assert lines[17].split("│")[1].rstrip() == " " * 17 + "17: 17-17"
    assert lines[299].split("│")[1].rstrip() == " " * 17 + "299: 299-299"
