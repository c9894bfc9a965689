"""`Asked`: the blocks of a prompt that a shared store is asked for, and its answer."""

from collections.abc import Hashable
from dataclasses import dataclass

from xxhash import xxh3_128_digest

from kvblocks.core.sequence import Sequence
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.wishes import Prefix


@dataclass(eq=False, slots=True)
class Asked:
    """The first num_blocks blocks of a sequence, and with each of them num_columns blocks of side groups.

    found: which of `digests` the store has; None: not known.
    """

    sequence: Sequence
    prefix: Prefix
    num_blocks: int
    num_columns: int
    block_size: int
    found: list[bool] | None = None

    def name(self) -> Hashable:
        """A short name of the prefix, the same for each prompt that begins with it. O(tokens)."""
        return xxh3_128_digest(self.prefix.tokens), tuple((self.prefix.extra_keys or {}).items())

    def digests(self) -> list[bytes]:
        """The names of the blocks: those of the primary group; then, block by block, those of the other columns."""
        primary = [one.digest() for one in self.prefix.identities(0, self.num_blocks, self.block_size)]
        columns = range(1, self.num_columns + 1)
        beside = [BlockIdentity(above, b"", b"", column).digest() for above in primary for column in columns]
        return primary + beside

    def answer(self) -> tuple[int, list[tuple[int, int]]]:
        """How many first blocks are there, and what is attached to them, as `Tiers.note_found` takes it."""
        found = self.found or []
        primary, beside = found[: self.num_blocks], found[self.num_blocks :]
        number = primary.index(False) if False in primary else len(primary)
        columns = self.num_columns
        attached = [(place // columns, place % columns + 1) for place, is_there in enumerate(beside) if is_there]
        return number, [pair for pair in attached if pair[0] < number]


def ask_for(sequence: Sequence, block_size: int, num_columns: int) -> Asked:
    """What a store is asked for: all blocks before the last token. O(tokens)."""
    num_blocks = (sequence.num_tokens - 1) // block_size
    tokens = bytearray(sequence.packed_tokens()[: 4 * block_size * num_blocks])
    return Asked(sequence, Prefix(tokens, sequence.encoded_keys(block_size), []), num_blocks, num_columns, block_size)
