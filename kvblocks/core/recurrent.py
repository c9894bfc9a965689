"""The kind of groups whose layers keep a state."""

from dataclasses import dataclass
from typing import SupportsIndex

from kvblocks.arguments import check_count
from kvblocks.core.kinds import Group
from kvblocks.errors import InvalidArgumentError


@dataclass(frozen=True, init=False, repr=False)
class RecurrentState(Group):
    """Layers that keep one state per sequence, rewritten at each token.

    Examples are linear attention (gated delta nets, KDA), state spaces (Mamba2) and short convolutions. A running
    sequence has a *live state* in a slot: contiguous memory of the engine's, outside the pool. A *checkpoint* is a copy
    of the state after some number of tokens, in ordinary blocks of the pool, in any order. A hit ends at a checkpoint.

    - block_size: checkpoints are only made after multiples of this number of tokens.
    - num_slots: how many sequences can have a live state at once.
    - num_blocks: how many blocks of the pool a checkpoint takes, for all layers of this kind together. The attribute is
      checkpoint_blocks.
    - every: also save a checkpoint whenever this many tokens are passed; a multiple of all block sizes. None: only
      where a later prompt will probably need one. On the traces that were tried this hit as much, with far fewer
      copies.
    - num_kept: how many states before the newest one the engine keeps in each slot, so that a sequence can go back when
      drafts are rejected.

    Raises InvalidArgumentError.
    """

    num_slots: int
    checkpoint_blocks: int
    every: int | None
    num_kept: int

    def __init__(
        self,
        block_size: SupportsIndex,
        num_slots: SupportsIndex,
        num_blocks: SupportsIndex = 1,
        *,
        every: SupportsIndex | None = None,
        num_kept: SupportsIndex = 0,
    ) -> None:
        object.__setattr__(self, "block_size", check_count("block_size", block_size, 1))
        object.__setattr__(self, "num_slots", check_count("num_slots", num_slots, 1))
        object.__setattr__(self, "checkpoint_blocks", check_count("num_blocks", num_blocks, 1))
        object.__setattr__(self, "every", None if every is None else check_count("every", every, 1))
        object.__setattr__(self, "num_kept", check_count("num_kept", num_kept, 0))
        if self.every is not None and self.every % self.block_size:
            raise InvalidArgumentError(
                f"every: expected a multiple of block_size, which is {self.block_size}, got {self.every}"
            )

    @property
    def label(self) -> str:
        """As in `Group`."""
        return "a recurrent state"

    @property
    def event_kind(self) -> str:
        """As in `Group`: "mamba", which is what vLLM calls all layers that keep a state."""
        return "mamba"

    @property
    def has_table(self) -> bool:
        """False: its tokens need no blocks."""
        return False

    def first_seen(self, position: int) -> int:
        """Return `position`, since the state stands for all tokens before it. Only for the manager."""
        return position

    def num_blocks(self, num_tokens: SupportsIndex, num_step_tokens: SupportsIndex = 1) -> int:
        """Return 0: a live state lies in its slot, and checkpoints are cached blocks without an owner."""
        check_count("num_step_tokens", num_step_tokens, 1)
        check_count("num_tokens", num_tokens, 0)
        return 0

    def __repr__(self) -> str:
        options = f"every={self.every}, num_kept={self.num_kept}"
        return f"RecurrentState({self.block_size}, {self.num_slots}, {self.checkpoint_blocks}, {options})"
