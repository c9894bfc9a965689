"""The work for all contestants: the same tokens, sizes and numbers of blocks."""

from array import array
from random import Random

BLOCK_SIZE = 16
POOL_BLOCKS = 100_000
FILLER_BLOCKS = 64
"""A full cache holds prefixes of this many blocks, one after the other."""
VOCABULARY = 151_936
TAKEN_BLOCKS = 16_384
"""How many blocks one sample of `allocate`, `free` or `evict` handles, in calls of N blocks."""
SHARED_TOKENS, OWN_TOKENS, DECODED_TOKENS = 1024, 64, 128
"""A request's life: a prefix that is cached, a part of its own, and what is decoded."""
NUM_REQUESTS = 32
STEP_SEQUENCES, STEPS = 1024, 16
"""A decode step's running sequences, at evenly spread positions of their last block; and the steps of one sample."""


def random_tokens(num_tokens: int, seed: int) -> list[int]:
    """Return the same random token ids for the same seed, as a list."""
    return Random(seed).choices(range(VOCABULARY), k=num_tokens)


def filler(number: int, num_blocks: int = FILLER_BLOCKS) -> "array[int]":
    """Return the tokens of filler prefix `number`: all of them different, and from those of other fillers."""
    num_tokens = num_blocks * BLOCK_SIZE
    return array("I", range(number * num_tokens, (number + 1) * num_tokens))


def prompt(num_tokens: int) -> list[int]:
    """Return the prompt whose first `num_tokens` tokens are cached, and one token after them.

    The last token is added because an engine needs its logits, so no contestant uses a cached last token.
    """
    return random_tokens(num_tokens + 1, seed=num_tokens)


def half_prompt(num_tokens: int) -> list[int]:
    """Return `prompt(num_tokens)` with another second half."""
    cached = prompt(num_tokens)
    return cached[: num_tokens // 2] + random_tokens(num_tokens - num_tokens // 2 + 1, seed=-num_tokens)


def calls_for(num_tokens: int) -> int:
    """Return how many lookups of a prompt make one sample long enough to be timed well."""
    return max(1, 65_536 // num_tokens)


def shared_prefix() -> list[int]:
    """Return the prefix that all requests share."""
    return random_tokens(SHARED_TOKENS, seed=3)


def decoded_tokens() -> list[int]:
    """Return what a request decodes."""
    return random_tokens(DECODED_TOKENS, seed=4)


class FreshPrompts:
    """Prompts that were never used before, in the same order for all contestants."""

    def __init__(self) -> None:
        self.num_made = 0

    def make(self, num_tokens: int) -> list[int]:
        """Return the next one."""
        self.num_made += 1
        return random_tokens(num_tokens, seed=1_000_000 + self.num_made)

    def requests(self) -> list[list[int]]:
        """Return the prompts of requests that share a prefix."""
        shared = shared_prefix()
        return [shared + self.make(OWN_TOKENS) for _ in range(NUM_REQUESTS)]

    def running(self) -> list[list[int]]:
        """Return the prompts of a decode step's sequences, at evenly spread positions of their last block."""
        return [self.make(OWN_TOKENS + number % BLOCK_SIZE) for number in range(STEP_SEQUENCES)]


def step_tokens() -> list[list[int]]:
    """Return one token for each sequence of each step."""
    return [random_tokens(STEP_SEQUENCES, seed=5 + step) for step in range(STEPS)]
