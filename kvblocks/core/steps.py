"""A decode step: how tokens are added to its sequences, and which sequences leave a shared block.

A step adds one token to each of many sequences. With blocks of 16, 14 of 16 tokens fit the last block of their sequence
without filling it; `fits_below` tells. These tokens cost two passes: one to find the other sequences, which are at a
boundary, and one to add the tokens. Blocks are taken and cached only at boundaries.
"""

from array import array
from collections.abc import Callable
from operator import index
from typing import Any

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.change import CHANGING, Change
from kvblocks.core.sequence import Sequence
from kvblocks.core.tokens import describe_bad_id
from kvblocks.errors import InvalidTokensError

TableChange = tuple[int, int, int, int]
"""A table entry that a step changed: (index of the sequence in the step, group, index in its table, block id)."""


def append_each(change: Change, sequences: list[Sequence], tokens: list[Any]) -> None:
    """Begin a change by adding a token to each sequence, counted as computed.

    Raises InvalidTokensError, or whatever a token's own code raises. In that case all tokens are removed again and no
    change is under way.
    """
    change.state = CHANGING
    for sequence, token in zip(sequences, tokens):  # noqa: B905  # as many; `strict` isn't compiled
        try:
            try:
                sequence.tokens.append(token)  # type: ignore[union-attr]  # a view has no append
            except (AttributeError, BufferError):
                fits_below = sequence.fits_below
                sequence.truncate_tokens(sequence.num_computed_tokens)  # of an `__index__` that raised late
                sequence.append_packed(array("I", (index(token),)))
                sequence.fits_below = fits_below
        except BaseException as error:  # this token isn't counted yet, so the count says what to remove
            sequence.truncate_tokens(sequence.num_computed_tokens)
            remove_last(change, sequences[: sequences.index(sequence)])
            if isinstance(error, (TypeError, OverflowError, ValueError)):
                raise InvalidTokensError(describe_bad_id(tokens)) from None
            raise
        sequence.num_computed_tokens += 1


def remove_last(change: Change, sequences: list[Sequence]) -> None:
    """Remove the last token of each sequence, and end the change."""
    for sequence in sequences:
        sequence.num_computed_tokens -= 1
        sequence.truncate_tokens(sequence.num_computed_tokens)
        sequence.settle()
    change.end()


def shared_indices(unsure: list[Sequence], shared_index: Callable[[Sequence, int], int | None]) -> dict[Sequence, int]:
    """Return, for sequences of a step that leave a shared block, the block's index in their tables.

    The last owner of an uncached block keeps it. shared_index: returns the table index of the shared block that a
    sequence's next token would go to; None: the block isn't shared.
    """
    indices: dict[Sequence, int] = {}
    num_leaving: dict[KVCacheBlock, int] = {}
    for sequence in unsure:
        shared = shared_index(sequence, sequence.num_tokens)
        if shared is not None and leaves(sequence.blocks[shared], num_leaving):
            indices[sequence] = shared
    return indices


def leaves(block: KVCacheBlock, num_leaving: dict[KVCacheBlock, int]) -> bool:
    """Whether one more sequence of a step must leave this shared block for a new one.

    A cached block is always left; an uncached one is kept by its last owner. num_leaving: how many sequences have left
    each block so far; this call updates it. O(1).
    """
    number = num_leaving.get(block, 0)
    if not block.is_cached and number >= block.ref_cnt - 1:
        return False
    num_leaving[block] = number + 1
    return True


def keep_for_last(sequences: list[Sequence]) -> None:
    """If all owners of an uncached shared block would leave it in this step, let the last one keep it.

    The sequences have side tables, with the step's plan. O(sequences x groups).
    """
    num_leaving: dict[KVCacheBlock, int] = {}
    for sequence in sequences:
        side = sequence.side_tables
        if side is None:
            continue
        for table in side.tables:
            block = None if table.shared is None else table.live_block(table.shared)
            if block is not None and not leaves(block, num_leaving):
                table.shared = None
        if side.shared is not None and not leaves(sequence.blocks[side.shared], num_leaving):
            side.shared = None
