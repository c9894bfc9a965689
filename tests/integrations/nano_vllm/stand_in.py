"""A small stand-in for nano-vllm, for machines without its sources: the calls that its parts make of each other.

Written from what those calls mean, with tuples of tokens in place of hashes. Its block manager finds the first of
equal blocks, keeps no other one that is free, and takes blocks that hold nothing before others, as kvblocks does, so
decisions must be equal. As in
nano-vllm prompts go before decoding, only the first prompt of a step is cut, and the last to run is preempted first.
"""

import sys
from collections import deque
from itertools import count
from types import ModuleType


class Sequence:
    block_size = 256
    counter = count()

    def __init__(self, token_ids, sampling_params):
        self.seq_id = next(Sequence.counter)
        self.token_ids = [*token_ids]
        self.num_tokens = self.num_prompt_tokens = len(token_ids)
        self.num_cached_tokens = self.num_scheduled_tokens = 0
        self.block_table = []
        self.max_tokens = sampling_params.max_tokens
        self.is_finished = False

    def __len__(self):
        return self.num_tokens

    @property
    def num_blocks(self):
        return -(-self.num_tokens // self.block_size)

    def append_token(self, token_id):
        self.token_ids.append(token_id)
        self.num_tokens += 1


class BlockManager:
    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.free = deque(range(num_blocks))
        self.num_owners = [0] * num_blocks
        self.prefixes = {}  # block -> all tokens up to its end
        self.holders = {}  # such tokens -> the blocks that hold them, the first of which is found

    def can_allocate(self, seq):
        found = self._find(seq)
        num_missing = seq.num_blocks - sum(self.num_owners[block] > 0 for block in found)
        return len(found) if num_missing <= len(self.free) else -1

    def allocate(self, seq, num_cached_blocks):
        for block in self._find(seq)[:num_cached_blocks]:
            if not self.num_owners[block]:
                self.free.remove(block)
            self.num_owners[block] += 1
            seq.block_table.append(block)
        while len(seq.block_table) < seq.num_blocks:
            seq.block_table.append(self._take())
        seq.num_cached_tokens = num_cached_blocks * self.block_size

    def deallocate(self, seq):
        empty = []
        for block in reversed(seq.block_table):
            self.num_owners[block] -= 1
            if not self.num_owners[block]:
                (self.free if block in self.prefixes else empty).append(block)
        self.free.extendleft(reversed(empty))
        self._drop_copies(seq.block_table)
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def _drop_copies(self, table):
        """A free block is the first that holds its prefix: others hold nothing, and it is as new as they were."""
        dropped = []
        for block in table:
            first = self.holders[self.prefixes[block]][0] if block in self.prefixes else block
            if self.num_owners[block] or first == block:
                continue
            if not self.num_owners[first]:
                self.free.remove(first)
                self.free.insert(self.free.index(block), first)
            self.holders[self.prefixes.pop(block)].remove(block)
            dropped.append(block)
        for block in sorted(dropped, reverse=True):
            self.free.remove(block)
            self.free.appendleft(block)

    def can_append(self, seq):
        return seq.num_tokens % self.block_size != 1 or bool(self.free)

    def may_append(self, seq):
        if seq.num_tokens % self.block_size == 1:
            seq.block_table.append(self._take())

    def hash_blocks(self, seq):
        start = seq.num_cached_tokens // self.block_size
        for i in range(start, (seq.num_cached_tokens + seq.num_scheduled_tokens) // self.block_size):
            prefix = tuple(seq.token_ids[: (i + 1) * self.block_size])
            self.prefixes[seq.block_table[i]] = prefix
            self.holders.setdefault(prefix, []).append(seq.block_table[i])

    def _find(self, seq):
        found = []
        for end in range(self.block_size, seq.num_tokens, self.block_size):
            holders = self.holders.get(tuple(seq.token_ids[:end]))
            if not holders:
                break
            found.append(holders[0])
        return found

    def _take(self):
        block = self.free.popleft()
        prefix = self.prefixes.pop(block, None)
        if prefix is not None:
            self.holders[prefix].remove(block)
        self.num_owners[block] = 1
        return block


class Scheduler:
    def __init__(self, config):
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.block_manager = BlockManager(config.num_kvcache_blocks, config.kvcache_block_size)
        self.waiting, self.running = deque(), deque()

    def is_finished(self):
        return not (self.waiting or self.running)

    def add(self, seq):
        self.waiting.append(seq)

    def schedule(self):
        chosen = self._choose_prefills()
        if chosen:
            return chosen, True
        while self.running and len(chosen) < self.max_num_seqs:
            seq = self.running.popleft()
            while not self.block_manager.can_append(seq) and self.running:
                self._preempt(self.running.pop())
            if not self.block_manager.can_append(seq):
                self._preempt(seq)
                break
            self.block_manager.may_append(seq)
            seq.num_scheduled_tokens = 1
            chosen.append(seq)
        self.running.extendleft(reversed(chosen))
        return chosen, False

    def postprocess(self, seqs, token_ids, is_prefill):
        for seq, token_id in zip(seqs, token_ids, strict=True):
            self.block_manager.hash_blocks(seq)
            seq.num_cached_tokens += seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
            if is_prefill and seq.num_cached_tokens < seq.num_tokens:
                continue
            seq.append_token(token_id)
            if seq.num_tokens - seq.num_prompt_tokens == seq.max_tokens:
                seq.is_finished = True
                self.block_manager.deallocate(seq)
                self.running.remove(seq)

    def _choose_prefills(self):
        chosen, budget = [], self.max_num_batched_tokens
        while self.waiting and budget and len(chosen) < self.max_num_seqs:
            seq = self.waiting[0]
            is_new = not seq.block_table
            num_found = self.block_manager.can_allocate(seq) if is_new else 0
            if num_found < 0:
                break
            num_left = seq.num_tokens - (num_found * self.block_manager.block_size if is_new else seq.num_cached_tokens)
            if num_left > budget and chosen:
                break
            if is_new:
                self.block_manager.allocate(seq, num_found)
            seq.num_scheduled_tokens = min(num_left, budget)
            budget -= seq.num_scheduled_tokens
            if seq.num_cached_tokens + seq.num_scheduled_tokens == seq.num_tokens:
                self.running.append(self.waiting.popleft())
            chosen.append(seq)
        return chosen

    def _preempt(self, seq):
        self.block_manager.deallocate(seq)
        self.waiting.appendleft(seq)


def make_modules():
    """The stand-in as the modules that nano-vllm has, by name."""
    names = ("nanovllm", "nanovllm.engine", *(f"nanovllm.engine.{name}" for name in ("sequence", "block_manager")))
    modules = {name: ModuleType(name) for name in names}
    modules["nanovllm.engine.sequence"].Sequence = Sequence
    modules["nanovllm.engine.block_manager"].BlockManager = BlockManager
    modules["nanovllm.engine.scheduler"] = sys.modules[__name__]  # where its Scheduler looks for BlockManager
    for name, module in [*modules.items()]:
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules
