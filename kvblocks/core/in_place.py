"""The kind of groups whose layers keep a state in blocks of the pool, where kernels read and write it."""

from dataclasses import dataclass
from typing import SupportsIndex

from kvblocks.arguments import check_count
from kvblocks.core.kinds import Group
from kvblocks.errors import InvalidArgumentError


@dataclass(frozen=True)
class StateInPlace(Group):
    """Layers that keep one state per sequence, in a block of the pool, as vLLM's kernels expect it.

    The last block of a sequence's table has its live state. When a call makes room past that block's last token, the
    sequence gets one block, as the table's new last entry. Entries in between, however many, have no block. The engine
    copies the state from the earlier block to the new one before it goes on. The earlier block stays until the next
    call. If the call before ended exactly at its last token, it is cached, and a hit may end there. An engine should
    therefore end calls at multiples of `block_size`, unless they end in the block where they began.

    The state is always the one after all tokens with slots. `num_total_tokens` must therefore count the tokens that the
    step computes, including unknown ones, and nothing else.

    A cached state can be found at once, although it exists only after its step, so an engine must not start a sequence
    from a state of the same step. A sequence can't be truncated, and can only be rewound to its beginning.

    block_size: hits end at multiples of it. Raises InvalidArgumentError.
    """

    @property
    def label(self) -> str:
        """As in `Group`."""
        return "a state in place"

    @property
    def event_kind(self) -> str:
        """As in `Group`: "mamba", which is what vLLM calls all layers that keep a state."""
        return "mamba"

    @property
    def has_gaps(self) -> bool:
        """True: a table has blocks only where calls ended."""
        return True

    def first_seen(self, position: int) -> int:
        """Return the token before `position`, because a query needs the state after it. Only for the manager."""
        return position - 1 if position else 0

    def needed_blocks(self, end: int, num_tokens: int) -> tuple[int, int]:  # noqa: ARG002  # a hit never has all tokens
        """As in `Group`: the block with the state after the hit. Only for the manager."""
        return max(0, end // self.block_size - 1), end // self.block_size

    def num_blocks(self, num_tokens: SupportsIndex, num_step_tokens: SupportsIndex = 1) -> int:
        """Return at most 2: the block of the live state and the one before it."""
        check_count("num_step_tokens", num_step_tokens, 1)
        return min(2, -(-check_count("num_tokens", num_tokens, 0) // self.block_size))

    def layer_bytes(self, bytes_per_token: int) -> int:
        """Raise InvalidArgumentError, since such layers keep nothing for each token. Only for `plan`."""
        raise InvalidArgumentError(
            f"layers: expected layers with KV for each token, got {self!r} with {bytes_per_token}"
        )
