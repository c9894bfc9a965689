"""Shared prefixes: which sequences of a batch read the same physical blocks, for cascade attention.

A cascade kernel reads a stretch of blocks once for all sequences that share it, and merges the result with what each
sequence reads alone. `find_shared_prefixes` finds these stretches: the same blocks at the same indices of several block
tables, from the first block on. Equal tokens in different blocks don't count.

Such a kernel applies no causal mask within a stretch, so every query of every member must see every slot of it. A block
therefore counts only if it is full and all its tokens are among the first `num_visible_tokens` of each member. Reserved
blocks, and a partly filled block that a fork shares, never count.

Invariants: a cohort has two members or more. Its stretch begins where its parent's ends, and goes on for as long as all
its members share blocks. The stretches of the cohorts that contain a sequence thus follow one another from block 0 on,
outermost first. After the last of them the sequence reads alone; with min_blocks 1 it shares no block there.

Shared prefixes at several levels come from cascade attention in FlashInfer and from Hydragen. The algorithm is this
project's: members are compared with one leader, by slices, until they differ from it.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple, SupportsIndex

from kvblocks.arguments import check_count, listed
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.sequence import Sequence
from kvblocks.core.tokens import num_equal
from kvblocks.errors import InvalidArgumentError

_PART_BLOCKS = 128  # compared at a time; few are compared in vain, and their reference counts stay in the CPU's cache


class SharedPrefix(NamedTuple):
    """A stretch of blocks that several sequences of a batch share.

    - parent: index, in the list of cohorts, of the cohort whose stretch comes before this one; always a smaller index.
      None: this stretch begins at block 0.
    - members: indices of its sequences in the batch, ascending; all are members of the parent too.
    - start_block: index in their block tables where the stretch begins.
    - block_ids: the blocks of the stretch.
    - num_tokens: tokens in the stretch, all visible to every member.
    """

    parent: int | None
    members: tuple[int, ...]
    start_block: int
    block_ids: tuple[int, ...]
    num_tokens: int

    @property
    def num_blocks(self) -> int:
        """Blocks in the stretch. O(1)."""
        return len(self.block_ids)


def find_shared_prefixes(
    sequences: Items[Sequence],
    block_size: int,
    min_blocks: SupportsIndex = 1,
    num_visible_tokens: Items[SupportsIndex] | None = None,
) -> list[SharedPrefix]:
    """Return the cohorts of `sequences` that share blocks, at all levels of nesting, each cohort before those inside
    it.

    min_blocks: the shortest stretch that makes a cohort. The blocks of shorter stretches go to the cohorts inside,
    whose stretches then begin earlier. num_visible_tokens: for each sequence, how many of its first tokens all of its
    queries may attend to: the position of its first query, plus 1. None: num_computed_tokens, which is right for a step
    in which each sequence computes only its last token.

    A sequence without blocks is in no cohort. Changes nothing. Raises InvalidArgumentError. O(sequences + shared blocks
    of each + members of the cohorts, including those below `min_blocks`), with a comparison of pointers for each block.
    """
    smallest = check_count("min_blocks", min_blocks, 1)
    limits = _visible_blocks(sequences, block_size, num_visible_tokens)
    tables = [sequence.blocks for sequence in sequences]
    common = [0] * len(tables)
    cohorts: list[SharedPrefix] = []
    # (members, start of their stretch, blocks that they are known to share, parent)
    pending: list[tuple[list[int], int, int, int | None]] = []
    pending += [(members, 0, 0, None) for members in reversed(_part(tables, limits, range(len(tables)), 0))]
    while pending:
        members, start, num_known, parent = pending.pop()
        leader = max(members, key=limits.__getitem__)  # the member with which the others may share most
        _compare(tables, limits, members, leader, num_known, common)
        while len(members) > 1:
            end = min([common[member] for member in members])
            if end - start >= smallest:
                block_ids = tuple([block.block_id for block in tables[leader][start:end]])
                cohorts.append(SharedPrefix(parent, tuple(members), start, block_ids, (end - start) * block_size))
                parent, start = len(cohorts) - 1, end
            leaving = [member for member in members if common[member] == end]
            members = [member for member in members if common[member] > end]
            pending += [(sharing, start, end, parent) for sharing in reversed(_part(tables, limits, leaving, end))]
    return cohorts


def _visible_blocks(
    sequences: Items[Sequence], block_size: int, num_visible_tokens: Items[SupportsIndex] | None
) -> list[int]:
    """Return how many of each sequence's blocks, from the first, may count as shared."""
    if num_visible_tokens is None:
        return [sequence.num_computed_tokens // block_size for sequence in sequences]
    given = listed("num_visible_tokens", "an iterable of ints", num_visible_tokens)
    if len(given) != len(sequences):
        raise InvalidArgumentError(
            f"num_visible_tokens: expected one for each of {len(sequences)} sequences, got {len(given)}"
        )
    return [
        check_count("num_visible_tokens", num_tokens, 0, sequence.num_computed_tokens) // block_size
        for sequence, num_tokens in zip(sequences, given, strict=True)
    ]


def _part(tables: list[list[KVCacheBlock]], limits: list[int], among: Iterable[int], position: int) -> list[list[int]]:
    """Return the cohorts of two or more of the tables `among` that have the same block at `position`."""
    sharing: dict[KVCacheBlock, list[int]] = {}
    for i in among:
        if limits[i] > position:
            sharing.setdefault(tables[i][position], []).append(i)
    return [members for members in sharing.values() if len(members) > 1]


def _compare(
    tables: list[list[KVCacheBlock]],
    limits: list[int],
    members: list[int],
    leader: int,
    num_known: int,
    common: list[int],
) -> None:
    """Write to `common`, for each of `members`, how many blocks it shares with `leader`, at least `num_known`.

    leader: a member with the highest limit. Slices are compared in C, part after part: all members with one part, then
    with the next. Where a member differs from the leader, bisection finds where. O(blocks shared with the leader).
    """
    low, end, going = num_known, limits[leader], [member for member in members if member != leader]
    common[leader] = end
    while going:
        high = min(low + _PART_BLOCKS, end)
        part = tables[leader][low:high]
        equal: list[int] = []
        for member in going:
            blocks = tables[member][low : min(high, limits[member])]
            if blocks == part:
                equal.append(member)
                common[member] = high
            else:
                common[member] = low + num_equal(blocks, part)
        going = equal if high < end else []
        low = high
