"""KV-cache groups: what an engine says of its layers, where they don't all attend alike.

A group is a set of layers that share a block table: they attend alike (all of the past, or a window of it) and a block
of theirs holds as many tokens. One pool serves all groups, so a block id stands for the same number of bytes in each;
`plan` puts a model's layers into such groups.

What follows from them for the manager is in `layout`.

Groups of layers with a block table each, over one pool, are vLLM's hybrid KV-cache manager's.
"""

from dataclasses import dataclass
from typing import SupportsIndex

from kvblocks.arguments import check_count, check_flag


@dataclass(frozen=True)
class FullAttention:
    """Layers that attend to everything before a token. block_size: tokens in a block. Raises InvalidArgumentError."""

    block_size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", check_count("block_size", self.block_size, 1))

    @property
    def window(self) -> int | None:
        """None: there is none."""
        return None

    @property
    def is_cached(self) -> bool:
        """True: hits are what its blocks hold."""
        return True

    @property
    def keeps_passed(self) -> bool:
        """False: there is no window to leave."""
        return False

    def num_blocks(self, num_tokens: SupportsIndex, num_step_tokens: SupportsIndex = 1) -> int:
        """Return how many blocks a sequence of `num_tokens` holds at most; `num_step_tokens` make no difference."""
        check_count("num_step_tokens", num_step_tokens, 1)
        return -(-check_count("num_tokens", num_tokens, 0) // self.block_size)


@dataclass(frozen=True)
class SlidingWindow:
    """Layers in which a token at position p attends to p - window + 1 to p.

    block_size: tokens in a block. window: at least 1; what Hugging Face's configs call sliding_window. is_cached:
    whether its blocks are cached; if not, hits don't wait for them: the sequence gets new blocks for what the first
    token behind the hit sees, and the engine computes that part of the hit once more for these layers. keeps_passed:
    whether what left the window is reused by last use, like other cached blocks, and not before them: better where
    prompts part anywhere, worse where they part where others ended. Raises InvalidArgumentError.
    """

    block_size: int
    window: int
    is_cached: bool = True
    keeps_passed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", check_count("block_size", self.block_size, 1))
        object.__setattr__(self, "window", check_count("window", self.window, 1))
        object.__setattr__(self, "is_cached", check_flag("is_cached", self.is_cached))
        object.__setattr__(self, "keeps_passed", check_flag("keeps_passed", self.keeps_passed))

    def num_blocks(self, num_tokens: SupportsIndex, num_step_tokens: SupportsIndex = 1) -> int:
        """Return how many blocks a sequence of `num_tokens` holds at most.

        num_step_tokens: the most that a step computes of it, such as a chunk of a prompt; the step holds what all of
        them see.
        """
        num_seen = check_count("num_step_tokens", num_step_tokens, 1) + self.window - 1
        # The tokens may begin with the last of a block, and end with the first of another.
        most = 1 if num_seen == 1 else (num_seen - 2) // self.block_size + 2
        return min(most, -(-check_count("num_tokens", num_tokens, 0) // self.block_size))


Group = FullAttention | SlidingWindow
"""A group of layers that share a block table."""
