"""KV-cache groups: how an engine describes its layers if they don't all attend in the same way.

A group is a set of layers that share a block table. Its layers attend in the same way (to all earlier tokens, or to a
window of them), and have the same number of tokens in a block. One pool serves all groups, so a block has the same
number of bytes in each. `plan` puts a model's layers into such groups, and `layout` derives what the manager needs.

Groups of layers over one pool, each with a block table, come from vLLM's hybrid KV-cache manager.
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
        """None: no window."""
        return None

    @property
    def is_cached(self) -> bool:
        """True: hits consist of its blocks."""
        return True

    @property
    def keeps_passed(self) -> bool:
        """False: no block leaves a window."""
        return False

    def num_blocks(self, num_tokens: SupportsIndex, num_step_tokens: SupportsIndex = 1) -> int:
        """Return how many blocks a sequence of `num_tokens` holds at most; `num_step_tokens` makes no difference."""
        check_count("num_step_tokens", num_step_tokens, 1)
        return -(-check_count("num_tokens", num_tokens, 0) // self.block_size)


@dataclass(frozen=True)
class SlidingWindow:
    """Layers in which a token at position p attends to p - window + 1 to p.

    block_size: tokens in a block. window: at least 1; Hugging Face's configs call it sliding_window. is_cached: whether
    its blocks are cached. If not, hits don't need them: the sequence gets new blocks for what the first token behind
    the hit sees, and the engine computes that part of the hit again for these layers. keeps_passed: whether blocks that
    left the window are reused in order of last use, like other cached blocks, and not before those. True is better
    if prompts part from earlier ones anywhere, False if they mostly part where an earlier one ended. Raises
    InvalidArgumentError.
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

        num_step_tokens: the most tokens that a step computes of it, such as a chunk of a prompt. In a step the sequence
        holds the blocks that all these tokens see.
        """
        num_seen = check_count("num_step_tokens", num_step_tokens, 1) + self.window - 1
        # The first of these tokens may be the last in its block, and the last one the first in its block.
        most = 1 if num_seen == 1 else (num_seen - 2) // self.block_size + 2
        return min(most, -(-check_count("num_tokens", num_tokens, 0) // self.block_size))


Group = FullAttention | SlidingWindow
"""A group of layers that share a block table."""
