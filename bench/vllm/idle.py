"""A KV cache manager that does nothing: the floor below every manager.

It returns answers that were made in advance, and tracks nothing. So a step of the scheduler costs only vLLM's own work.
"""

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

NO_BLOCKS = KVCacheBlocks(((),))


class MadeBlocks(KVCacheBlocks):
    """Blocks whose list of ids was made in advance."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(((),))
        self._block_ids = ([*range(1, num_blocks + 1)],)

    def get_block_ids(self, *_: Any, **__: Any) -> tuple[list[int], ...]:
        """Return the ids, always the same list."""
        return self._block_ids


class IdleManager:
    """Has the calls that vLLM's Scheduler makes on its manager without a connector. num_cached: tokens of every hit."""

    usage = 0.0
    empty_kv_cache_blocks = NO_BLOCKS
    mamba_shared_prefix_checkpoint = False

    def __init__(self, block_size: int, spec: Any, num_cached: int) -> None:
        group = SimpleNamespace(block_size=block_size, kv_cache_spec=spec)
        self.coordinator = SimpleNamespace(single_type_managers=[group], enable_partial_hash_hits=False)
        self._hit = (NO_BLOCKS, 0, 0)
        self._table = NO_BLOCKS
        self.set_cached(num_cached, block_size)

    def set_cached(self, num_cached: int, block_size: int) -> None:
        """Find `num_cached` tokens from now on."""
        self._hit = (NO_BLOCKS, num_cached, 0)
        self._table = MadeBlocks(num_cached // block_size + 1)

    def get_computed_blocks(self, *_: Any) -> tuple[KVCacheBlocks, int, int]:
        """Return a hit."""
        return self._hit

    def allocate_slots(self, *_: Any, **__: Any) -> KVCacheBlocks:
        """Return no new block."""
        return NO_BLOCKS

    def get_blocks(self, _: str) -> KVCacheBlocks:
        """Return a table."""
        return self._table

    def cache_blocks(self, *_: Any) -> None:
        """Do nothing."""

    def free(self, _: Request) -> None:
        """Do nothing."""

    def new_step_starts(self) -> None:
        """Do nothing."""

    def record_prefix_cache_stats(self, *_: Any) -> None:
        """Do nothing."""

    def make_prefix_cache_stats(self) -> None:
        """Return no statistics."""

    def take_events(self) -> None:
        """Return no events."""

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """Return none."""
        return {}

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """Return none."""
        return [], []

    def take_new_block_ids(self) -> list[int]:
        """Return none."""
        return []

    def estimate_cached_tokens(self, _: Request) -> int:
        """Return none."""
        return 0


class _Idle:
    """Puts the manager in the place of vLLM's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        scheduler: Any = self
        spec = scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        scheduler.kv_cache_manager = IdleManager(scheduler.block_size, spec, 0)


class IdleScheduler(_Idle, Scheduler):
    """vLLM's scheduler with a manager that does nothing."""


class IdleAsyncScheduler(_Idle, AsyncScheduler):
    """vLLM's async scheduler with a manager that does nothing."""
