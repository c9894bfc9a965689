"""A picture of the cached prefixes, for people.

The cached prefixes form a forest. A run is cut after every block that other runs are attached to, and each piece is one
`PrefixRow`, with its parent. Every cached block is in exactly one row, as a block that hits get or as a duplicate.
`prefix_rows` makes the rows, `to_dot` draws them for Graphviz, and `engine.cache_table` prints them as a table.

Rows are in depth-first order: a row, then its first child with all rows below, then its second child, and so on. The
rest of a row's own run is its first child; the other children follow, oldest first.
"""

from array import array
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple, SupportsIndex

from kvblocks.arguments import check_count, counted
from kvblocks.core.block import KVCacheBlock, Run
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.hashing.extra_keys import ExtraKey, decode_extra_keys

_MAX_FIRST_TOKENS = 8
_MAX_KEYS = 4  # in a description; a row has all
_MAX_PAYLOAD = 24  # characters or bytes of a key in a description


class PrefixRow(NamedTuple):
    """Consecutive cached blocks up to a point where cached prefixes branch or end.

    - parent: index of the row before it in its prefixes; None: it begins a prefix.
    - depth: how many rows come before it in its prefixes.
    - start_token: position of its first token in the prefix. num_tokens: tokens in its blocks.
    - num_blocks: blocks that hits get. num_duplicates: further blocks that hold the same prefixes.
    - num_owned: how many of all these blocks have an owner; the others are free.
    - first_tokens: ids of the first tokens, at most 8.
    - extra_keys: the keys of its blocks, each once, with spans as (first position in the prefix, length).
    - num_pinned: how many of all its blocks a pin holds.
    - num_ahead: how many free blocks are reused before the first of its blocks is, by the free queue alone; None: that
      block has an owner. The smaller the number, the longer ago the row was last used.
    """

    parent: int | None
    depth: int
    start_token: int
    num_tokens: int
    num_blocks: int
    num_duplicates: int
    num_owned: int
    first_tokens: tuple[int, ...]
    extra_keys: tuple[ExtraKey, ...]
    num_pinned: int = 0
    num_ahead: int | None = None

    @property
    def num_free(self) -> int:
        """Blocks without an owner, duplicates included. O(1)."""
        return self.num_blocks + self.num_duplicates - self.num_owned

    def describe_keys(self) -> list[str]:
        """Return the first of its extra keys, one per line, and how many more there are."""
        lines = [describe_key(key) for key in self.extra_keys[:_MAX_KEYS]]
        if len(self.extra_keys) > _MAX_KEYS:
            lines.append(f"and {counted(len(self.extra_keys) - _MAX_KEYS, 'more key')}")
        return lines

    def describe_tokens(self) -> str:
        """Return its first token ids, with … if it has more."""
        text = " ".join([str(token) for token in self.first_tokens])
        return f"{text} …" if self.num_tokens > len(self.first_tokens) else text


def prefix_rows(
    index: PrefixIndex, free: Iterable[KVCacheBlock] = (), pinned: Collection[KVCacheBlock] = frozenset()
) -> list[PrefixRow]:
    """Return the cached prefixes of `index` as rows, parents first. Changes nothing.

    free: the free blocks, in the order in which they will be reused. pinned: the blocks that pins hold. O(cached and
    free blocks + keys).
    """
    rows: list[PrefixRow] = []
    places = {block: number for number, block in enumerate(free)}
    roots = [run for run in index.runs() if run.key[0] is None]
    # (run, first position of the next row, ends of that row and of those after it, last first, parent's index)
    pending: list[tuple[Run, int, list[int], int | None]] = []
    pending += [(run, 0, _ends(run), None) for run in reversed(roots)]
    while pending:
        run, first, ends, parent = pending.pop()
        end, row_index = ends.pop(), len(rows)
        blocks = _blocks(run, first, end)
        rows.append(
            _row(run, first, end, parent, rows)._replace(
                num_owned=sum([block.ref_cnt > 0 for block in blocks]),
                num_pinned=sum([block in pinned for block in blocks]),
                num_ahead=places.get(blocks[0]),
            )
        )
        children = list(run.children.get(end - 1, {})) if run.children else []
        pending += [(child, 0, _ends(child), row_index) for child in reversed(children)]
        if ends:
            pending.append((run, end, ends, row_index))
    return rows


def describe_key(key: ExtraKey) -> str:
    """Return an extra key as one line of printable text. A long key is cut, and its length is added."""
    kind, span, payload = key
    text = repr(payload)
    if len(payload) > _MAX_PAYLOAD:
        unit = "characters" if isinstance(payload, str) else "bytes"
        text = f"{payload[:_MAX_PAYLOAD]!r}… ({len(payload)} {unit})"
    return f"{kind} {text}" if span is None else f"{kind} {text} at {span[0]}-{span[0] + span[1] - 1}"


def describe_blocks(rows: Items[PrefixRow]) -> str:
    """Return how many blocks `rows` have together, such as "5 blocks (2 owned, 3 free, 1 duplicate)"."""
    num_blocks = sum([row.num_blocks + row.num_duplicates for row in rows])
    num_duplicates = sum([row.num_duplicates for row in rows])
    parts = [f"{sum([row.num_owned for row in rows])} owned", f"{sum([row.num_free for row in rows])} free"]
    if num_duplicates:
        parts.append(_counted(num_duplicates, "duplicate"))
    num_pinned = sum([row.num_pinned for row in rows])
    if num_pinned:
        parts.append(f"{num_pinned} pinned")
    return f"{_counted(num_blocks, 'block')} ({', '.join(parts)})"


def to_dot(rows: Items[PrefixRow], max_nodes: SupportsIndex | None = 200) -> str:
    """Return a Graphviz document of `rows`: a node for each row, below one node for the whole cache.

    max_nodes: draw at most this many rows, those nearest to the beginning of prefixes; one more node then says what was
    left out. None: draw all. Rows with owned blocks are shaded. Raises InvalidArgumentError. O(rows log rows).
    """
    limit = len(rows) if max_nodes is None else check_count("max_nodes", max_nodes, 1)
    by_depth = sorted([(row.depth, i) for i, row in enumerate(rows)])
    drawn = sorted([i for _, i in by_depth[:limit]])
    left_out = [rows[i] for _, i in by_depth[limit:]]
    whole = ["cached prefixes", describe_blocks(rows)] if rows else ["nothing is cached"]
    lines = ["digraph prefix_cache {", "  rankdir=LR;", '  node [shape=box, fontname="monospace"];']
    lines.append(f"  cache [label={_quoted(whole)}, style=rounded];")
    for i in drawn:
        row = rows[i]
        shade = ', style=filled, fillcolor="lightblue"' if row.num_owned else ""
        lines.append(f"  row{i} [label={_quoted(_label(row))}{shade}];")
        lines.append(f"  {'cache' if row.parent is None else f'row{row.parent}'} -> row{i};")
    if left_out:
        lines.append(f"  left_out [label={_quoted(_left_out(left_out))}, style=dashed];")
        lines.append("  cache -> left_out [style=dashed];")
    return "\n".join([*lines, "}", ""])


def _ends(run: Run) -> list[int]:
    """Return where the rows of `run` end, last first: after blocks that other runs are attached to, and at its end."""
    ends = {len(run.blocks)}
    if run.children:
        ends |= {position + 1 for position in run.children}
    return sorted(ends, reverse=True)


def _blocks(run: Run, first: int, end: int) -> list[KVCacheBlock]:
    """Return the blocks of `run`'s positions first to end - 1: those that hits get, followed by the duplicates."""
    blocks = run.blocks[first:end]
    if run.duplicates:
        for position in range(first, end):
            blocks += run.duplicates.get(position, ())
    return blocks


def _row(run: Run, first: int, end: int, parent: int | None, rows: list[PrefixRow]) -> PrefixRow:
    """Return the row of `run`'s positions first to end - 1, which are attached to rows[parent]."""
    depth = start_token = 0
    if parent is not None:
        depth, start_token = rows[parent].depth + 1, rows[parent].start_token + rows[parent].num_tokens
    block_size = run.epoch.block_bytes // 4
    num_tokens = (end - first) * block_size
    num_first = min(num_tokens, _MAX_FIRST_TOKENS)
    first_byte = first * run.epoch.block_bytes
    return PrefixRow(
        parent=parent,
        depth=depth,
        start_token=start_token,
        num_tokens=num_tokens,
        num_blocks=end - first,
        num_duplicates=len(_blocks(run, first, end)) - (end - first),
        num_owned=0,
        first_tokens=tuple(array("I", bytes(run.tokens[first_byte : first_byte + 4 * num_first]))),
        extra_keys=_keys(run, first, end, start_token),
    )


def _keys(run: Run, first: int, end: int, start_token: int) -> tuple[ExtraKey, ...]:
    """Return the extra keys of `run`'s positions first to end - 1, each once. start_token: where `first` begins."""
    if run.extra_keys is None:
        return ()
    block_size = run.epoch.block_bytes // 4
    keys: dict[ExtraKey, None] = {}
    for position in range(first, end):
        block_start = start_token + (position - first) * block_size
        for kind, in_block, payload in decode_extra_keys(run.extra_keys.get(position, b"")):
            span = None if in_block is None else (block_start + in_block[0], in_block[1])
            keys[kind, span, payload] = None
    return tuple(keys)


def _label(row: PrefixRow) -> list[str]:
    span = f"tokens {row.start_token}-{row.start_token + row.num_tokens - 1}"
    order = [] if row.num_ahead is None else [f"reused after {_counted(row.num_ahead, 'block')}"]
    return [span, describe_blocks([row]), *order, *row.describe_keys(), row.describe_tokens()]


def _left_out(rows: list[PrefixRow]) -> list[str]:
    return [f"left out: {_counted(len(rows), 'node')}", describe_blocks(rows)]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _quoted(lines: list[str]) -> str:
    """Return `lines` as a quoted string of the dot language, left-justified.

    Escapes what has a meaning to Graphviz: backslashes, quotes and HTML entities. `lines` are printable.
    """
    escaped = [line.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;") for line in lines]
    return '"' + "".join([f"{line}\\l" for line in escaped]) + '"'
