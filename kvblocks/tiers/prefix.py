"""`Prefix`: a cached prefix with the blocks of all groups in one list, so that jobs handle all of them alike."""

from kvblocks.core.block import KVCacheBlock, Run
from kvblocks.core.sequence import Sequence
from kvblocks.retention.quotas import salt_in
from kvblocks.tiers.identity import BlockIdentity

Home = tuple[int, int]
"""Where a side group's block is attached: the index of the primary block, and the column there."""

_NO_BLOCKS: list[KVCacheBlock] = []
_NO_HOMES: list[Home] = []


class Prefix:
    """A cached prefix: its packed tokens, its encoded keys by block, and the blocks that hold it."""

    def __init__(
        self,
        tokens: bytearray,
        extra_keys: dict[int, bytes] | None,
        blocks: list[KVCacheBlock],
        side_blocks: list[KVCacheBlock] = _NO_BLOCKS,
        homes: list[Home] = _NO_HOMES,
        num_parts: int = 1,
    ) -> None:
        """blocks: the primary group's. side_blocks: what is attached to them, at these homes."""
        self.tokens = tokens
        self.extra_keys = extra_keys
        self.blocks = blocks + side_blocks if side_blocks else blocks
        """The primary group's blocks, then side groups', then the parts of checkpoints."""
        self.num_primary = len(blocks)
        """How many of the blocks are the primary group's."""
        self.num_attached = len(side_blocks)
        """How many homes come before those of checkpoints."""
        self.homes = homes
        """Where the blocks after the primary ones are attached. The columns of checkpoints' parts come last."""
        self.num_parts = num_parts
        """How many blocks each checkpoint has."""
        self._digests: list[bytes] = [b""]  # before the first block, after the first, and so on, as far as asked for

    @property
    def salt(self) -> str | None:
        """The salt of its blocks. O(length of the salt)."""
        return salt_in((self.extra_keys or {}).get(0))

    def add_states(self, checkpoints: dict[int, list[KVCacheBlock]], row_size: int) -> None:
        """Add checkpoints, by the number of primary blocks before each. row_size: of side groups' rows. O(blocks)."""
        for number, blocks in checkpoints.items():
            self.blocks = self.blocks + blocks
            self.homes = self.homes + [(number - 1, row_size + index) for index in range(len(blocks))]

    def whole_states(self, num_side: int) -> range:
        """Return where the checkpoints begin that are complete in the first num_side blocks after the primary ones."""
        return range(self.num_attached, num_side - self.num_parts + 1, self.num_parts)

    def num_whole(self, first: int, number: int) -> int:
        """Return how many blocks from index `first` on may move together: at most `number`, without splitting a
        checkpoint.

        What comes before `first` has moved. O(1).
        """
        begin = self.num_primary + self.num_attached
        over = max(0, first + number - max(first, begin))
        return number - over % self.num_parts

    def identities(self, first: int, end: int, block_size: int) -> list[BlockIdentity]:
        """Return the identities of blocks first to end - 1. O(blocks), plus O(blocks before them) at the first call.

        Those of the primary group follow from the tokens, so a prefix may have them without having blocks.
        """
        if not self.homes:
            return self._identities(first, end, block_size)
        number = self.num_primary
        found = self._identities(first, min(end, number), block_size) if first < number else []
        for position, column in self.homes[max(0, first - number) : max(0, end - number)]:
            above = self._identities(position, position + 1, block_size)[0]
            found.append(BlockIdentity(above.digest(), b"", b"", column + 1))
        return found

    def begins_with(self, other: "Prefix", block_size: int) -> bool:
        """Whether this prefix begins with `other`, by its tokens and keys. O(its tokens)."""
        num_blocks = len(other.tokens) // (4 * block_size)
        if not self.tokens.startswith(other.tokens):
            return False
        keys = {index: key for index, key in (self.extra_keys or {}).items() if index < num_blocks}
        return keys == (other.extra_keys or {})

    def token_view(self) -> "memoryview[int]":
        """Return the tokens as u32."""
        return memoryview(self.tokens).cast("I")

    def _identities(self, first: int, end: int, block_size: int) -> list[BlockIdentity]:
        keys, size, found = self.extra_keys or {}, 4 * block_size, list[BlockIdentity]()
        for index in range(min(first, len(self._digests) - 1), end):
            tokens = bytes(self.tokens[index * size : (index + 1) * size])
            identity = BlockIdentity(self._digests[index], keys.get(index, b""), tokens)
            if index + 1 == len(self._digests):
                self._digests.append(identity.digest())
            if index >= first:
                found.append(identity)
        return found


def prefix_of(run: Run, num_blocks: int) -> Prefix:
    """Return the cached prefix that ends after the first `num_blocks` blocks of `run`. O(its blocks)."""
    parts = [(run, num_blocks)]
    above, position, _, _ = run.key
    while above is not None:
        parts.append((above, position + 1))
        above, position, _, _ = above.key
    tokens, keys, blocks = bytearray(), dict[int, bytes](), list[KVCacheBlock]()
    for part, count in reversed(parts):
        for index, key in (part.extra_keys or {}).items():
            if index < count:
                keys[len(blocks) + index] = key
        tokens += part.tokens[: count * part.epoch.block_bytes]
        blocks += part.blocks[:count]
    return Prefix(tokens, keys or None, blocks)


def shortest_prefixes(blocks: list[KVCacheBlock]) -> list[Prefix]:
    """Return the prefixes that end in those of `blocks` that are cached.

    For consecutive blocks of a run, return only the first one's.
    """
    nodes = {block.node for block in blocks if block.is_cached}
    ends = [(run, index + 1) for run, index in nodes if run is not None and (run, index - 1) not in nodes]
    return [prefix_of(run, num_blocks) for run, num_blocks in ends]


def prefix_in(sequence: Sequence, num_blocks: int, block_size: int) -> Prefix:
    """Return the prefix of a sequence's first `num_blocks` blocks, cached or not. O(tokens)."""
    keys = {index: key for index, key in (sequence.encoded_keys(block_size) or {}).items() if index < num_blocks}
    tokens = bytearray(sequence.packed_tokens()[: 4 * block_size * num_blocks])
    return Prefix(tokens, keys or None, sequence.blocks[:num_blocks])
