"""What a manager of tiers and the mover of the bytes exchange: `Transfer`, `Loaded`."""

from typing import final

from kvblocks.arguments import counted
from kvblocks.closed import Closed
from kvblocks.core.sequence import Sequence
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.pool import TierPool
from kvblocks.tiers.prefix import Prefix

QUEUED, BEGUN, ENDED = 0, 1, 2
"""States of a transfer: not returned by `take_transfers` yet; begun; over, or never to begin."""


@final
class Transfer(Closed):
    """Blocks whose bytes are to be copied: block_ids[i] of the device, slots[i] of the tier.

    Made by `manager.tiers`; read-only, compared by identity.
    """

    __slots__ = (
        "_state",
        "block_ids",
        "generation",
        "has_arrived",
        "is_load",
        "num_bytes",
        "pool",
        "position",
        "prefix",
        "slots",
        "tier",
    )

    def __init__(
        self, generation: int, pool: TierPool, prefix: Prefix, position: int, slots: list[int], *, is_load: bool
    ) -> None:
        """pool: the tier's. prefix: contains the transfer's blocks, from index `position` on."""
        self.generation = generation
        """A number that no other transfer of its manager has."""
        self.pool = pool
        self.tier = pool.name
        """The tier's name."""
        self.prefix = prefix
        self.position = position
        self.block_ids = [block.block_id for block in prefix.blocks[position : position + len(slots)]]
        """The device's blocks."""
        self.slots = slots
        """The tier's slots."""
        self.num_bytes = len(slots) * pool.num_block_bytes
        """The bytes of all blocks."""
        self.is_load = is_load
        """True if the bytes go from the tier to the device, False for the other way."""
        self.has_arrived = False
        """Whether it ended well."""
        self._state = QUEUED
        if is_load:
            pool.num_loading_bytes += self.num_bytes

    @property
    def state(self) -> int:
        """QUEUED, BEGUN or ENDED. The tier counts the bytes of loads that haven't ended."""
        return self._state

    @state.setter
    def state(self, state: int) -> None:
        if self.is_load and state == ENDED != self._state:
            self.pool.num_loading_bytes -= self.num_bytes
        self._state = state

    @property
    def salt(self) -> str | None:
        """The salt of its blocks. O(length of the salt)."""
        return self.prefix.salt

    @property
    def max_blocks(self) -> int | None:
        """The quota of its salt in the tier; None without one. O(1)."""
        return self.pool.max_blocks_of(self.prefix.salt)

    def digests_before(self) -> list[bytes]:
        """Return the SHA-256 of each block of the prefix before its blocks. O(blocks before them), as `identities`."""
        before = self.prefix.identities(0, self.position, self.pool.index.block_size)
        return [identity.digest() for identity in before]

    def identities(self) -> list[BlockIdentity]:
        """Return its blocks' identities, which a tier that outlives the manager keeps beside the bytes and compares.

        O(blocks), and O(blocks before them) once per prefix.
        """
        return self.prefix.identities(self.position, self.position + len(self.slots), self.pool.index.block_size)

    def __repr__(self) -> str:
        kind = "load" if self.is_load else "store"
        return f"Transfer({self.generation}, {kind}, {self.tier!r}, {counted(len(self.slots), 'block')})"


@final
class Loaded(Closed):
    """What became of a sequence's loads, all of which have ended.

    num_tokens: how many tokens, from the first, have KV. The tokens after them must be computed. is_whole: whether
    everything that was to be loaded arrived. Made by `manager.tiers`; read-only.
    """

    __slots__ = ("is_whole", "num_tokens", "sequence")

    def __init__(self, sequence: Sequence, num_tokens: int, *, is_whole: bool) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.is_whole = is_whole

    def __repr__(self) -> str:
        state = "whole" if self.is_whole else "in part"
        return f"Loaded({self.sequence}, {counted(self.num_tokens, 'token')}, {state})"
