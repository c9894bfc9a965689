"""Slots for a whole decode step: one token for each of many sequences, in one call.

Fourteen of sixteen tokens fit the last block of their sequence and don't fill it. They cost one pass that finds the
others, the sequences at an edge, and one that adds the tokens; only at the edges blocks are taken and cached.
"""

from array import array
from operator import index
from typing import Any

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.caching import cache_filled_blocks, cache_full_blocks
from kvblocks.core.change import CHANGING
from kvblocks.core.sequence import Sequence
from kvblocks.core.slots import SlotAllocator
from kvblocks.core.tokens import pack_tokens, refuse_tokens


class StepAllocator(SlotAllocator):
    """`SlotAllocator` with steps."""

    def append_step(
        self, sequences: list[Sequence], tokens: list[Any], at_boundary: list[Sequence], places: dict[Sequence, int]
    ) -> list[tuple[int, int, int]] | None:
        """Add one token to each sequence, as `append`; the changes of block tables as (place, position, block id).

        at_boundary: those of the sequences that aren't before their next edge. places: of all, in `sequences`.
        """
        block_size = self._block_size
        growing: list[Sequence] = []
        filling: list[Sequence] = []
        others: list[Sequence] = []
        unsure: list[Sequence] = []
        for sequence in at_boundary:
            num_tokens = sequence.num_computed_tokens
            if sequence.tail_owner is None:
                unsure.append(sequence)
            if num_tokens % block_size == block_size - 1:
                filling.append(sequence)
            elif num_tokens < len(sequence.blocks) * block_size:
                others.append(sequence)
            if num_tokens >= len(sequence.blocks) * block_size:
                growing.append(sequence)
        shared = self._shared_places(unsure) if unsure else {}
        if shared:
            growing = sorted({*growing, *shared}, key=places.__getitem__)
        if self._lacks_in_step(len(growing), tokens):
            return None
        self._append_each(sequences, tokens)
        digests = self._digests_of_step(sequences, at_boundary) if self._index.needs_digests else {}
        changes = self._grow_by_one(growing, shared, places)
        for sequence in others:
            if sequence.tail_owner is not None:  # the last to leave a shared block keeps it, and is asked again
                self._find_fits_below(sequence)
        if digests:
            for sequence in filling:
                cache_full_blocks(self._index, sequence, digests[sequence])
        else:
            cache_filled_blocks(self._index, filling)
        return changes

    def _lacks_in_step(self, num_blocks: int, tokens: list[Any]) -> bool:
        """`_lacks`, but a bad token is told even if there is no room: InvalidTokensError, and no refusal."""
        if num_blocks > self._pool.num_free_blocks:
            pack_tokens(tokens)
        return self._lacks(num_blocks)

    def _append_each(self, sequences: list[Sequence], tokens: list[Any]) -> None:
        """Begin a change by adding a token to each sequence, counted as computed.

        Raises InvalidTokensError, or what a token's own code does, with the others taken back and no change under way.
        """
        self.manager.change_state = CHANGING
        for sequence, token in zip(sequences, tokens):  # noqa: B905  # as many; `strict` isn't compiled
            try:
                try:
                    sequence.tokens.append(token)  # type: ignore[union-attr]  # a view has no append
                except (AttributeError, BufferError):
                    fits_below = sequence.fits_below
                    sequence.truncate_tokens(sequence.num_computed_tokens)  # what an odd integer left half done
                    sequence.append_packed(array("I", (index(token),)))
                    sequence.fits_below = fits_below
            except BaseException as error:  # nothing is counted in here, so it is known what there is to take back
                sequence.truncate_tokens(sequence.num_computed_tokens)
                self._take_back(sequences[: sequences.index(sequence)])
                if isinstance(error, (TypeError, OverflowError, ValueError)):
                    refuse_tokens(tokens)
                raise
            sequence.num_computed_tokens += 1

    def _take_back(self, sequences: list[Sequence]) -> None:
        """Take the last token from each sequence, which ends the change."""
        for sequence in sequences:
            sequence.num_computed_tokens -= 1
            sequence.truncate_tokens(sequence.num_computed_tokens)
        self.manager.end_change()

    def _digests_of_step(
        self, sequences: list[Sequence], at_boundary: list[Sequence]
    ) -> dict[Sequence, bytearray | None]:
        """Return the digests of the blocks that the last tokens of those `at_boundary` fill.

        A hash function that raises takes the tokens back from all sequences.
        """
        try:
            return {sequence: self._digests_ahead(sequence, sequence.num_tokens) for sequence in at_boundary}
        except BaseException:
            self._take_back(sequences)
            raise

    def _grow_by_one(
        self, growing: list[Sequence], shared: dict[Sequence, int], places: dict[Sequence, int]
    ) -> list[tuple[int, int, int]]:
        changes: list[tuple[int, int, int]] = []
        if not growing:
            return changes
        block_size = self._block_size
        for sequence, block in zip(growing, self._take_for(growing)):  # noqa: B905  # as in `_append_each`
            position = len(sequence.blocks)
            if shared and sequence in shared:
                position = shared[sequence]
                self._replace(sequence, position, block)
            else:
                sequence.blocks.append(block)
                sequence.fits_below = (position + 1) * block_size - 1
            changes.append((places[sequence], position, block.block_id))
        return changes

    def _shared_places(self, unsure: list[Sequence]) -> dict[Sequence, int]:
        """`_shared_place` of sequences of a step; the last to leave a block may keep it."""
        places: dict[Sequence, int] = {}
        num_leaving: dict[KVCacheBlock, int] = {}
        for sequence in unsure:
            place = self._shared_place(sequence, sequence.num_tokens)
            if place is not None:
                block = sequence.blocks[place]
                if block.is_cached or num_leaving.get(block, 0) < block.ref_cnt - 1:
                    num_leaving[block] = num_leaving.get(block, 0) + 1
                    places[sequence] = place
        return places

    def _take_for(self, sequences: list[Sequence]) -> list[KVCacheBlock]:
        """Take a block for each sequence, together unless it is remembered who took what. O(sequences)."""
        if self._index.history is None:
            return self._take(len(sequences), sequences[0])
        self._make_free(len(sequences))
        return [block for sequence in sequences for block in self._take(1, sequence)]
