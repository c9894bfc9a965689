"""The cached prefixes as a table for the terminal. `manager.inspect.prefix_rows` makes its rows."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from kvblocks import PrefixRow
from kvblocks.arguments import counted

_MAX_INDENT = 16  # the most levels of indentation; a cache may be thousands of levels deep


def cache_table(rows: Sequence[PrefixRow], max_rows: int | None = None) -> Table:
    """Return the rows of `prefix_rows` as a table, indented by depth. Print it with rich.

    max_rows: the most rows to show; if there are more, a last line sums them up. None: show all. O(rows).
    """
    shown = rows if max_rows is None else rows[: max(max_rows, 0)]
    left_out = rows[len(shown) :]
    table = Table(title=Text(_title(rows) if rows else "Nothing is cached"))
    for heading in ("tokens", "blocks", "duplicates", "owned", "free", "keys", "begins with"):
        is_number = heading in ("blocks", "duplicates", "owned", "free")
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")  # cut nothing off
    for row in shown:
        # Text, not str: a salt may look like rich's markup.
        keys, tokens = Text("\n".join(row.describe_keys())), Text(row.describe_tokens())
        table.add_row(_span(row), *_counts([row]), keys, tokens)
    if left_out:
        table.add_row(Text(f"{counted(len(left_out), 'row')} left out", style="italic"), *_counts(left_out), "", "")
    return table


def _title(rows: Sequence[PrefixRow]) -> str:
    num_blocks, num_duplicates, num_owned, num_free = map(int, _counts(rows))
    return f"Cached prefixes: {counted(num_blocks + num_duplicates, 'block')} ({num_owned} owned, {num_free} free)"


def _span(row: PrefixRow) -> Text:
    mark = f"{row.depth}: " if row.depth > _MAX_INDENT else ""
    indent = " " * min(row.depth, _MAX_INDENT)
    return Text(f"{indent}{mark}{row.start_token}-{row.start_token + row.num_tokens - 1}")


def _counts(rows: Sequence[PrefixRow]) -> list[str]:
    """The numbers of blocks of all `rows` together: those that hits get, duplicates, owned, free."""
    counts = [(row.num_blocks, row.num_duplicates, row.num_owned, row.num_free) for row in rows]
    return [str(sum(column)) for column in zip(*counts, strict=True)]
