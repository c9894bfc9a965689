"""`Asked`: a query to a shared store for the blocks of a prompt, with its answer."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from xxhash import xxh3_128_digest

from kvblocks import BlockIdentity, Sequence


@dataclass(eq=False, slots=True)
class Asked:
    """The first `num_blocks` blocks of a sequence, each with the `num_columns` blocks of side groups that belong to it.

    tokens: those of these blocks, packed. extra_keys: the sequence's, encoded, by block. found: for each of `digests`,
    whether the store has it; None: not known yet.
    """

    sequence: Sequence
    tokens: bytes
    extra_keys: Mapping[int, bytes]
    num_blocks: int
    num_columns: int
    block_size: int
    found: list[bool] | None = None

    def name(self) -> Hashable:
        """A short name of the prefix, equal for all prompts that begin with it. O(tokens)."""
        return xxh3_128_digest(self.tokens), tuple(self.extra_keys.items())

    def digests(self) -> list[bytes]:
        """The names of the blocks: first those of the primary group, then by block those of the other columns."""
        primary, digest, size = list[bytes](), b"", 4 * self.block_size
        for number in range(self.num_blocks):
            tokens = self.tokens[number * size : (number + 1) * size]
            digest = BlockIdentity(digest, self.extra_keys.get(number, b""), tokens).digest()
            primary.append(digest)
        columns = range(1, self.num_columns + 1)
        beside = [BlockIdentity(above, b"", b"", column).digest() for above in primary for column in columns]
        return primary + beside

    def answer(self) -> tuple[int, list[tuple[int, int]]]:
        """How many leading blocks the store has, and what is attached to them, in the form of `Tiers.note_found`."""
        found = self.found or []
        primary, beside = found[: self.num_blocks], found[self.num_blocks :]
        number = primary.index(False) if False in primary else len(primary)
        columns = self.num_columns
        attached = [(place // columns, place % columns + 1) for place, is_there in enumerate(beside) if is_there]
        return number, [pair for pair in attached if pair[0] < number]


def ask_for(sequence: Sequence, block_size: int, num_columns: int) -> Asked:
    """Make the query for a sequence: all its full blocks before the last token. O(tokens)."""
    num_blocks = (sequence.num_tokens - 1) // block_size
    tokens = bytes(sequence.packed_tokens()[: 4 * block_size * num_blocks])
    return Asked(sequence, tokens, sequence.encoded_keys(block_size) or {}, num_blocks, num_columns, block_size)
