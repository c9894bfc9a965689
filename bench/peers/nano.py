"""nano-vllm's BlockManager, from a checkout that the environment variable NANO_SRC names; it isn't on PyPI."""
# ruff: noqa: E402  # what must be set before the peer is imported stands between the imports

import os
import sys
from functools import cached_property
from pathlib import Path
from types import ModuleType

if "NANO_SRC" not in os.environ:
    raise ImportError("set NANO_SRC to a checkout of nano-vllm")
for _package in ("nanovllm", "nanovllm.engine"):  # without running their __init__, which wants a GPU's packages
    _module = ModuleType(_package)
    _module.__path__ = [str(Path(os.environ["NANO_SRC"], *_package.split(".")))]
    sys.modules.setdefault(_package, _module)

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

from bench.core.driver import Cases, Driver
from bench.core.workload import (
    BLOCK_SIZE,
    FILLER_BLOCKS,
    NUM_REQUESTS,
    OWN_TOKENS,
    POOL_BLOCKS,
    SHARED_TOKENS,
    STEPS,
    TAKEN_BLOCKS,
    FreshPrompts,
    calls_for,
    decoded_tokens,
    filler,
    half_prompt,
    prompt,
    shared_prefix,
    step_tokens,
)
from bench.timing import Case

Sequence.block_size = BLOCK_SIZE
Sequences = list[Sequence]


def start(manager: BlockManager, token_ids: list[int]) -> Sequence:
    """Return a running sequence, its full blocks cached."""
    sequence = Sequence(token_ids)
    manager.allocate(sequence, manager.can_allocate(sequence))
    sequence.num_scheduled_tokens = len(sequence) - sequence.num_cached_tokens
    manager.hash_blocks(sequence)
    sequence.num_cached_tokens = len(sequence)
    return sequence


def decode(manager: BlockManager, sequences: Sequences, token_ids: list[int]) -> None:
    """Decode one token for each sequence, as its scheduler does."""
    for sequence, token_id in zip(sequences, token_ids, strict=True):
        sequence.append_token(token_id)
        manager.can_append(sequence)
        manager.may_append(sequence)
        sequence.num_scheduled_tokens = 1
        manager.hash_blocks(sequence)
        sequence.num_cached_tokens += 1


class NanoVLLM(Driver):
    """nano-vllm with blocks of 16 tokens."""

    label = "nano-vllm"
    version = "checkout"
    note = "Takes lists; hits rehash; a touch searches a deque, so it isn't timed on a full pool."

    def __init__(self) -> None:
        self._fresh = FreshPrompts()
        self._empty = BlockManager(POOL_BLOCKS, BLOCK_SIZE)

    @cached_property
    def _full(self) -> BlockManager:
        manager = BlockManager(POOL_BLOCKS, BLOCK_SIZE)
        self.fill(manager)
        return manager

    def _blank(self, num_blocks: int) -> Sequences:
        return [Sequence([0] * (num_blocks * BLOCK_SIZE)) for _ in range(TAKEN_BLOCKS // num_blocks)]

    def _take(self, sequences: Sequences) -> Sequences:
        for sequence in sequences:
            self._empty.allocate(sequence, 0)
        return sequences

    def _release(self, sequences: Sequences) -> None:
        for sequence in reversed(sequences):
            self._empty.deallocate(sequence)

    def allocate(self, num_blocks: int) -> Cases:
        """`allocate` of blocks that hold nothing."""
        sequences = self._blank(num_blocks)
        return {"": Case(lambda _: self._take(sequences), TAKEN_BLOCKS, tidy=self._release)}

    def free(self, num_blocks: int) -> Cases:
        """`deallocate`."""
        sequences = self._blank(num_blocks)
        return {"": Case(self._release, TAKEN_BLOCKS, prepare=lambda: self._take(sequences))}

    def chain_hash(self, num_tokens: int) -> Cases:
        """`compute_hash` of each block."""
        sequence = Sequence(self._fresh.make(num_tokens))

        def run(_: None) -> None:
            previous = -1
            for block in range(num_tokens // BLOCK_SIZE):
                previous = BlockManager.compute_hash(sequence.block(block), previous)

        return {"xxh64": Case(run, num_tokens / BLOCK_SIZE)}

    def _hit(self, num_tokens: int, token_ids: list[int], num_hit_tokens: int) -> Cases:
        manager = self._full
        manager.deallocate(start(manager, prompt(num_tokens)))
        sequence = Sequence(token_ids)
        assert manager.can_allocate(sequence) == num_hit_tokens // BLOCK_SIZE
        num_calls = max(1, calls_for(num_tokens) // 16)

        def run(_: None) -> None:
            for _call in range(num_calls):
                manager.can_allocate(sequence)

        return {"hash and lookup": Case(run, num_calls)}

    def hit_buffer(self, num_tokens: int) -> Cases:
        """`can_allocate`."""
        return self._hit(num_tokens, prompt(num_tokens), num_tokens)

    def hit_list(self, num_tokens: int) -> Cases:
        """`can_allocate`."""
        return self._hit(num_tokens, prompt(num_tokens), num_tokens)

    def half_hit(self, num_tokens: int) -> Cases:
        """`can_allocate`."""
        return self._hit(num_tokens, half_prompt(num_tokens), num_tokens // 2)

    def _free_all(self, sequences: Sequences) -> None:
        for sequence in sequences:
            self._full.deallocate(sequence)

    def append(self, num_sequences: int) -> Cases:
        """`append_token`, `may_append` and `hash_blocks` for each token."""
        manager, tokens = self._full, decoded_tokens()

        def prepare() -> Sequences:
            size = SHARED_TOKENS + OWN_TOKENS
            return [start(manager, self._fresh.make(size)) for _ in range(num_sequences)]

        def run(sequences: Sequences) -> Sequences:
            for token_id in tokens:
                decode(manager, sequences, [token_id] * len(sequences))
            return sequences

        return {"": Case(run, num_sequences * len(tokens), prepare, self._free_all)}

    def step(self, num_sequences: int) -> Cases:
        """As `append`."""
        manager, steps = self._full, step_tokens()

        def prepare() -> Sequences:
            return [start(manager, token_ids) for token_ids in self._fresh.running()]

        def run(sequences: Sequences) -> Sequences:
            for token_ids in steps:
                decode(manager, sequences, token_ids)
            return sequences

        return {"": Case(run, num_sequences * STEPS, prepare, self._free_all)}

    def lifecycle(self, num_sequences: int) -> Cases:
        """`can_allocate`, `allocate`, decoding, `deallocate`."""
        manager, tokens = self._full, decoded_tokens()
        manager.deallocate(start(manager, [*shared_prefix(), 0]))

        def run(prompts: list[list[int]]) -> None:
            for first in range(0, len(prompts), num_sequences):
                sequences = [start(manager, token_ids) for token_ids in prompts[first : first + num_sequences]]
                for token_id in tokens:
                    decode(manager, sequences, [token_id] * len(sequences))
                self._free_all(sequences)

        return {"xxh64": Case(run, NUM_REQUESTS, prepare=self._fresh.requests)}

    def hold_empty_pool(self) -> BlockManager:
        """Return a new manager."""
        return BlockManager(POOL_BLOCKS, BLOCK_SIZE)

    def fill(self, pool: object) -> None:
        """Cache fillers, a sequence each."""
        assert isinstance(pool, BlockManager)
        for number in range(POOL_BLOCKS // FILLER_BLOCKS):
            pool.deallocate(start(pool, filler(number).tolist()))
