"""kvblocks as the block manager of nano-vllm, whose scheduler stays as it is.

    from kvblocks.integrations import nano_vllm

    nano_vllm.install()  # before the LLM is made

docs/integrations/nano-vllm.md says what it gains, what is refused, and how it was tested.

nano-vllm caches a block after the step that computes it. `KVBlocksBlockManager` does the same, so it decides exactly as
nano-vllm's own manager does. But all layers of nano-vllm store a step's K and V before they attend, and its scheduler
removes nobody from a step. So with `KVBlocksEarlyBlockManager`, later prompts of a step hit what earlier prompts of the
same step compute.
"""

import inspect
import re
from typing import Any

from kvblocks import CacheHit, KVCacheManager, PoolExhaustedError, Sequence
from kvblocks.integrations import probing

TESTED_COMMITS = ("bb823b3e06983d71485a8e1f23715ebd87d98ef8",)
"""Tested commits of GeeeekExplorer/nano-vllm 0.2.0. It has no releases, so its parts are checked, not its version."""

_CALLS = dict.fromkeys(("can_allocate", "deallocate", "can_append", "may_append", "hash_blocks"), "seq")
_CALLS["allocate"] = "seq num_cached_blocks"
_FIELDS = ("seq_id", "token_ids", "num_tokens", "num_cached_tokens", "num_scheduled_tokens", "block_table")

_replaced: list[type] = []  # nano-vllm's own class, while ours replaces it


class KVBlocksBlockManager:
    """A drop-in replacement for nano-vllm's BlockManager, with the calls that its scheduler makes.

    manager: the KVCacheManager underneath, for pins, quotas, explanations and statistics. `seq` is always a `Sequence`
    of nano-vllm. Like nano-vllm, it isn't thread-safe.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.manager = KVCacheManager(num_blocks, block_size)
        self._sequences: dict[int, Sequence] = {}  # by seq_id: sequences that have blocks
        self._asked: tuple[Any, Sequence, CacheHit] | None = None  # the last `can_allocate`

    def can_allocate(self, seq: Any) -> int:
        """Return how many blocks of a sequence are cached; -1 if there is no room for the others. Changes nothing.

        The last block never counts, full or not, since the model must compute at least one token for its logits. The
        first call for a sequence takes O(tokens); later calls cost as much as `KVCacheManager.get_computed_blocks`.
        """
        own, hit = self._look_up(seq)
        missing = self.manager.get_num_blocks_to_allocate(own, own.num_tokens, hit=hit)
        return len(hit.blocks) if self._has_room(missing, num_others=len(self._sequences)) else -1

    def allocate(self, seq: Any, num_cached_blocks: int) -> None:
        """Give a sequence blocks for all of its tokens. The first `num_cached_blocks` of them are cached ones.

        Raises PoolExhaustedError, with nothing changed, but never if `can_allocate` has just found room. O(blocks).
        """
        asked = self._asked
        own, hit = asked[1:] if asked is not None and asked[0] is seq else self._look_up(seq)
        self._asked = None
        hit = hit.cut(num_cached_blocks * self.block_size)
        if self.manager.allocate_slots(own, hit=hit, delay_cache_blocks=True) is None:
            raise PoolExhaustedError(f"allocate: expected room for {own}, got {self.manager.num_free_blocks} blocks")
        self._sequences[seq.seq_id] = own
        seq.block_table.extend(own.block_ids)
        seq.num_cached_tokens = len(hit.blocks) * self.block_size

    def deallocate(self, seq: Any) -> None:
        """Give a sequence's blocks back. Written blocks stay cached. Raises KeyError for a sequence without blocks."""
        self.manager.free(self._sequences.pop(seq.seq_id))
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def can_append(self, seq: Any) -> bool:
        """Whether there is room for a sequence's last token, which has no slot yet. Changes nothing. O(1)."""
        needs_block = seq.num_tokens % self.block_size == 1
        return not needs_block or self._has_room(1, num_others=len(self._sequences) - 1)

    def may_append(self, seq: Any) -> None:
        """Make room for a sequence's last token. Raises PoolExhaustedError. O(1), or O(block_size) for a new block."""
        if seq.num_tokens % self.block_size == 1:
            own = self._sequences[seq.seq_id]
            if self.manager.append_slots(own, seq.token_ids[own.num_tokens :], delay_cache_blocks=True) is None:
                raise PoolExhaustedError(f"may_append: expected a free block for {own}, got none")
            seq.block_table.append(own.block_ids[-1])

    def hash_blocks(self, seq: Any) -> None:
        """Cache the blocks that the last step has filled. The name is nano-vllm's; nothing here depends on a hash."""
        start = seq.num_cached_tokens
        end = start + seq.num_scheduled_tokens
        if start // self.block_size < end // self.block_size:
            own = self._sequences[seq.seq_id]
            if own.num_tokens < end:  # tokens that fill the last block needed no room, so this manager hasn't seen them
                self.manager.append_slots(own, seq.token_ids[own.num_tokens : end], delay_cache_blocks=True)
            self.manager.cache_blocks(own, end)

    def _look_up(self, seq: Any) -> tuple[Sequence, CacheHit]:
        asked = self._asked
        if asked is not None and asked[0] is seq and asked[1].num_tokens == seq.num_tokens:
            own = asked[1]  # a waiting sequence: its tokens haven't changed
        else:
            own = Sequence(seq.seq_id, seq.token_ids)
        last = (own.num_tokens - 1) // self.block_size * self.block_size
        hit = self.manager.get_computed_blocks(own, last)
        self._asked = seq, own, hit
        return own, hit

    def _has_room(self, num_blocks: int, *, num_others: int) -> bool:
        """Whether num_blocks blocks are available. Pins give up blocks if no other sequence could give any back."""
        return num_blocks <= self.manager.num_free_blocks or (num_others == 0 and bool(self.manager.pins))


class KVBlocksEarlyBlockManager(KVBlocksBlockManager):
    """A `KVBlocksBlockManager` in which a prompt also hits what earlier prompts of the same step will compute.

    This is correct as long as every layer stores a step's K and V before it attends to them, as nano-vllm's layers do.
    A failed step leaves blocks cached that nobody wrote. Make a new LLM then, as with nano-vllm's own manager.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._prefills: dict[int, Any] = {}  # by seq_id: prompts whose last block isn't written yet

    def can_allocate(self, seq: Any) -> int:
        """As in the base class, but blocks scheduled since the last step count as cached.

        Takes O(prompts of this step) more.
        """
        for other in [*self._prefills.values()]:
            self.hash_blocks(other)
        return super().can_allocate(seq)

    def allocate(self, seq: Any, num_cached_blocks: int) -> None:
        """As in the base class."""
        super().allocate(seq, num_cached_blocks)
        self._prefills[seq.seq_id] = seq

    def deallocate(self, seq: Any) -> None:
        """As in the base class."""
        super().deallocate(seq)
        self._prefills.pop(seq.seq_id, None)

    def hash_blocks(self, seq: Any) -> None:
        """As in the base class."""
        super().hash_blocks(seq)
        if self._prefills and seq.num_cached_tokens + seq.num_scheduled_tokens == seq.num_tokens:
            self._prefills.pop(seq.seq_id, None)


def install(*, early: bool = False) -> None:
    """Replace nano-vllm's BlockManager by kvblocks, for every LLM that is made from now on.

    early: whether prompts also hit what others of the same step compute (`KVBlocksEarlyBlockManager`). Replaces one
    name in memory, `nanovllm.engine.scheduler.BlockManager`; `uninstall` restores it. Raises UnsupportedEngineError.
    """
    from nanovllm.engine import scheduler

    check_nano_vllm()
    if not _replaced:
        _replaced.append(scheduler.BlockManager)
    scheduler.BlockManager = KVBlocksEarlyBlockManager if early else KVBlocksBlockManager


def uninstall() -> None:
    """Restore nano-vllm's own BlockManager, for every LLM that is made from now on. No effect if it is in place."""
    if _replaced:
        from nanovllm.engine import scheduler

        scheduler.BlockManager = _replaced.pop()


def check_nano_vllm() -> None:
    """Raise UnsupportedEngineError unless the parts of nano-vllm that are used are as expected. Changes nothing."""
    from nanovllm.engine import block_manager, scheduler
    from nanovllm.engine.sequence import Sequence as Theirs

    manager = getattr(block_manager, "BlockManager", None)
    wrong = ["block_manager.BlockManager"] if manager is None else probing.differing_calls(manager, _CALLS)
    source = inspect.getsource(getattr(scheduler, "Scheduler", scheduler))
    if not re.search(r"block_manager = BlockManager\(config\.num_kvcache_blocks, config\.kvcache_block_size\)", source):
        wrong.append(
            "expected a Scheduler that makes BlockManager(config.num_kvcache_blocks, config.kvcache_block_size)"
        )
    called = re.findall(r"\bblock_manager\.(\w+)\(", source)
    wrong += [f"Scheduler has block_manager.{name}" for name in dict.fromkeys(called) if name not in _CALLS]
    wrong += [f"Scheduler lacks block_manager.{name}" for name in _CALLS if name not in called]
    fields = inspect.getsource(Theirs)
    wrong += [f"Sequence.{name}" for name in _FIELDS if f"self.{name}" not in fields]
    probing.check_parts(
        "kvblocks.integrations.nano_vllm", f"nano-vllm as of {TESTED_COMMITS[0][:12]}", "one in which differ:", wrong
    )
