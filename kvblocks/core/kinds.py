"""KV-cache groups: how an engine describes its layers if they don't all attend in the same way.

A group is a set of layers that share a block table. Its layers attend in the same way: to all earlier tokens, to a
window of them, or to those of the same chunk. They have the same number of tokens in a block. One pool serves all
groups, so a block has the same number of bytes in each. `plan` puts a model's layers into such groups, and `layout`
derives what the manager needs.

Each kind of layers is a class here, and everything that the manager has to know about a kind is a method of `Group`.
Adding a kind therefore means adding one class: nothing else asks which kind a group is.

Groups of layers over one pool, each with a block table, come from vLLM's hybrid KV-cache manager.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import gcd
from typing import SupportsIndex

from kvblocks.arguments import check_count, check_flag, shown
from kvblocks.closed import check_subclass
from kvblocks.errors import InvalidArgumentError

MOST_TOKENS = 1 << 62
"""More tokens than any sequence can have."""


@dataclass(frozen=True)
class Group(ABC):
    """A group of layers that attend alike: the base class of all kinds. block_size: tokens in a block.

    A kind says in `first_seen` which tokens its layers see. From that follows what a hit needs, and what no later query
    sees. A kind of your own is derived from this class; kvblocks' own kinds can't be subclassed.
    """

    block_size: int

    def __init_subclass__(cls) -> None:
        """Raise TypeError for a class that is derived from one of kvblocks' kinds."""
        for base in cls.__mro__[1:]:
            if base is not Group and issubclass(base, Group) and base.__module__.startswith("kvblocks."):
                check_subclass(cls, base, "derive a kind of your own from Group")

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", check_count("block_size", self.block_size, 1))

    @property
    @abstractmethod
    def label(self) -> str:
        """How its layers attend, for people: "full attention", "a window of 512"."""

    @property
    @abstractmethod
    def event_kind(self) -> str:
        """The name of the kind in events, as vLLM has it."""

    @property
    def window_tokens(self) -> int | None:
        """The number of tokens in its window, as events and kernels take it; None for kinds without a window."""
        return None

    @property
    def chunk_tokens(self) -> int | None:
        """The number of tokens in its chunks, as kernels take it; None for kinds without chunks."""
        return None

    @property
    def sees_all(self) -> bool:
        """Whether a token sees all earlier ones, so that hits can consist of the group's blocks alone."""
        return False

    @property
    def has_table(self) -> bool:
        """Whether a sequence has a block table for it. Without one, its tokens need no blocks."""
        return True

    @property
    def has_tokens(self) -> bool:
        """Whether its blocks hold the KV of tokens, so that hits end where its blocks do."""
        return True

    @property
    def has_gaps(self) -> bool:
        """Whether a call gives a sequence only the block of its last token, and no block before that one."""
        return False

    @property
    def is_cached(self) -> bool:
        """Whether its blocks are cached, so that hits need them."""
        return True

    @property
    def keeps_passed(self) -> bool:
        """Whether blocks that no later query sees are reused in order of last use, like other cached blocks."""
        return False

    @abstractmethod
    def first_seen(self, position: int) -> int:
        """Return the position of the first token that a query at `position` sees. Only for the manager. O(1).

        The result must never decrease as the position grows: lookups skip the blocks before a missing one (`hit`), and
        tables release blocks that no later query sees (`tables`).
        """

    @abstractmethod
    def num_blocks(self, num_tokens: SupportsIndex, num_step_tokens: SupportsIndex = 1) -> int:
        """Return the most blocks that a sequence of `num_tokens` tokens holds at a time. Raises InvalidArgumentError.

        num_step_tokens: the most tokens of it that one step computes, such as a chunk of a prompt. During a step the
        sequence holds the blocks that all these tokens see.
        """

    def first_needed(self, position: int) -> int:
        """Return the index of its first block with a token that a query at `position` sees. Only for the manager. O(1).

        Steps ask for this more than for anything else. A kind may override it to do in one call what takes two here.
        """
        return self.first_seen(position) // self.block_size

    def needed_blocks(self, end: int, num_tokens: int) -> tuple[int, int]:
        """Return the range of blocks that a hit of `end` tokens needs: the first one, and the last one + 1.

        num_tokens: how many tokens the sequence has. If the hit has all of them, its last token is computed again. For
        a group that isn't cached the range is empty, and begins where the sequence's own blocks begin. Only for the
        manager. O(1).
        """
        if not end:
            return 0, 0
        first = self.first_needed(end - 1 if end == num_tokens else end)
        return first, end // self.block_size if self.is_cached else first

    def layer_bytes(self, bytes_per_token: int) -> int:
        """Return how many bytes of a block a layer with this many bytes per token takes. Only for `plan`. O(1)."""
        return bytes_per_token * self.block_size


@dataclass(frozen=True)
class FullAttention(Group):
    """Layers in which a token attends to itself and all earlier tokens. block_size: tokens in a block.

    Raises InvalidArgumentError.
    """

    @property
    def label(self) -> str:
        """As in `Group`."""
        return "full attention"

    @property
    def event_kind(self) -> str:
        """As in `Group`."""
        return "full_attention"

    @property
    def sees_all(self) -> bool:
        """True: hits consist of its blocks."""
        return True

    def first_seen(self, position: int) -> int:  # noqa: ARG002  # every query sees the first token
        """Return 0. Only for the manager."""
        return 0

    def num_blocks(self, num_tokens: SupportsIndex, num_step_tokens: SupportsIndex = 1) -> int:
        """Return how many blocks a sequence of `num_tokens` tokens holds; `num_step_tokens` makes no difference."""
        check_count("num_step_tokens", num_step_tokens, 1)
        return -(-check_count("num_tokens", num_tokens, 0) // self.block_size)


@dataclass(frozen=True)
class SlidingWindow(Group):
    """Layers in which a token at position p attends to positions p - window + 1 to p.

    - block_size: tokens in a block.
    - window: at least 1. Hugging Face's configs call it sliding_window.
    - is_cached: whether its blocks are cached. If not, hits don't need them: the sequence gets new blocks for what the
      first token after the hit sees, and the engine computes that part of the hit again for these layers.
    - keeps_passed: whether blocks that left the window are reused in order of last use, like other cached blocks. If
      not, they are reused before those. True is better if prompts may diverge from earlier ones at any point, False if
      they mostly diverge where an earlier prompt ended.

    Raises InvalidArgumentError.
    """

    window: int
    is_cached: bool = True
    keeps_passed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "window", check_count("window", self.window, 1))
        object.__setattr__(self, "is_cached", check_flag("is_cached", self.is_cached))
        object.__setattr__(self, "keeps_passed", check_flag("keeps_passed", self.keeps_passed))

    @property
    def label(self) -> str:
        """As in `Group`."""
        return f"a window of {self.window}"

    @property
    def event_kind(self) -> str:
        """As in `Group`."""
        return "sliding_window"

    @property
    def window_tokens(self) -> int | None:
        """The size of the window."""
        return self.window

    def first_seen(self, position: int) -> int:
        """As in `Group`. Only for the manager."""
        return 0 if position < self.window else position - self.window + 1

    def first_needed(self, position: int) -> int:
        """As in `Group`. Only for the manager."""
        return 0 if position < self.window else (position - self.window + 1) // self.block_size

    def num_blocks(self, num_tokens: SupportsIndex, num_step_tokens: SupportsIndex = 1) -> int:
        """As in `Group`."""
        num_seen = check_count("num_step_tokens", num_step_tokens, 1) + self.window - 1
        # The first of these tokens may be the last in its block.
        most = -(-(self.block_size - 1 + num_seen) // self.block_size)
        return min(most, -(-check_count("num_tokens", num_tokens, 0) // self.block_size))


@dataclass(frozen=True)
class ChunkedLocal(Group):
    """Layers in which a token attends to itself and to earlier tokens in the same chunk.

    - block_size: tokens in a block.
    - chunk_size: at least 1; chunks begin at its multiples. Hugging Face's configs call it attention_chunk_size. A hit
      that ends between two chunks needs no block of such a group.
    - is_cached, keeps_passed: as in `SlidingWindow`, with a chunk instead of the window.

    Raises InvalidArgumentError.
    """

    chunk_size: int
    is_cached: bool = True
    keeps_passed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "chunk_size", check_count("chunk_size", self.chunk_size, 1))
        object.__setattr__(self, "is_cached", check_flag("is_cached", self.is_cached))
        object.__setattr__(self, "keeps_passed", check_flag("keeps_passed", self.keeps_passed))

    @property
    def label(self) -> str:
        """As in `Group`."""
        return f"chunks of {self.chunk_size}"

    @property
    def event_kind(self) -> str:
        """As in `Group`."""
        return "chunked_local_attention"

    @property
    def chunk_tokens(self) -> int | None:
        """The size of its chunks."""
        return self.chunk_size

    def first_seen(self, position: int) -> int:
        """As in `Group`. Only for the manager."""
        return position // self.chunk_size * self.chunk_size

    def first_needed(self, position: int) -> int:
        """As in `Group`. Only for the manager."""
        return position // self.chunk_size * self.chunk_size // self.block_size

    def num_blocks(self, num_tokens: SupportsIndex, num_step_tokens: SupportsIndex = 1) -> int:
        """As in `Group`."""
        num_seen = check_count("num_step_tokens", num_step_tokens, 1) + self.chunk_size - 1
        # The first of these tokens may be the last in its chunk, which begins as late in a block as chunks do.
        latest_start = self.block_size - gcd(self.block_size, self.chunk_size)
        most = -(-(latest_start + num_seen) // self.block_size)
        return min(most, -(-check_count("num_tokens", num_tokens, 0) // self.block_size))


@dataclass(frozen=True, init=False, repr=False)
class Scratch(Group):
    """Layers, such as ring buffers, that need one block of the pool per sequence, however many tokens the sequence has.

    The sequence has that block from its first slot to its end. The block is never cached, and hits don't need it. A
    sequence that starts with a hit gets a block in which nothing is written, and can't go back before the hit's end.
    """

    def __init__(self) -> None:
        object.__setattr__(self, "block_size", MOST_TOKENS)

    @property
    def label(self) -> str:
        """As in `Group`."""
        return "one block a sequence"

    @property
    def event_kind(self) -> str:
        """As in `Group`. Nothing of this kind is cached, so no event has it."""
        return "scratch"

    @property
    def has_tokens(self) -> bool:
        """False: what its block holds is not per token."""
        return False

    @property
    def is_cached(self) -> bool:
        """False: nothing of it is cached."""
        return False

    def first_seen(self, position: int) -> int:
        """Return `position`: the block holds no earlier token as such. Only for the manager."""
        return position

    def num_blocks(self, num_tokens: SupportsIndex, num_step_tokens: SupportsIndex = 1) -> int:
        """Return 1, or 0 for a sequence without tokens."""
        check_count("num_step_tokens", num_step_tokens, 1)
        return min(1, check_count("num_tokens", num_tokens, 0))

    def layer_bytes(self, bytes_per_token: int) -> int:
        """Raise InvalidArgumentError, since such layers keep nothing for each token. Only for `plan`."""
        raise InvalidArgumentError(
            f"layers: expected layers with KV for each token, got {self!r} with {bytes_per_token}"
        )

    def __repr__(self) -> str:
        return "Scratch()"


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


def kind_of_layers(
    block_size: SupportsIndex, window: SupportsIndex | None = None, chunk_size: SupportsIndex | None = None
) -> Group:
    """Return the kind of layers that a model's config describes by the tokens that they see.

    window: as in `SlidingWindow`; None: they have no window. chunk_size: as in `ChunkedLocal`; None: they have no
    chunks. With neither, the layers have full attention. Raises InvalidArgumentError, also if both are given. O(1).
    """
    size = check_count("block_size", block_size, 1)
    if window is not None and chunk_size is not None:
        raise InvalidArgumentError(f"expected a window or a chunk_size, got {shown(window)} and {shown(chunk_size)}")
    if window is not None:
        return SlidingWindow(size, check_count("window", window, 1))
    return FullAttention(size) if chunk_size is None else ChunkedLocal(size, check_count("chunk_size", chunk_size, 1))
