"""vLLM's schedulers with kvblocks' manager instead of their own, for `--scheduler-cls`.

vLLM's Scheduler makes its own manager. These classes replace that manager at the end of the constructor. They may also
replace two names in memory, which `uninstall` restores:

- The function that makes vLLM's request hasher, until the engine core has called it, since kvblocks needs no hashes.
- `EngineCore.add_lora` and `remove_lora`, so that an adapter that is loaded again gets a new key.
"""

import sys
import time
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from kvblocks import UnsupportedEngineError
from kvblocks.gate import SessionGate
from kvblocks.integrations.vllm.cache_manager import KVBlocksCacheManager
from kvblocks.integrations.vllm.early import asks_for_hashes, check_scheduler
from kvblocks.integrations.vllm.encoders import manager_class
from kvblocks.integrations.vllm.entrance import SchedulerEntrance, gate_option
from kvblocks.integrations.vllm.probe import falls_back
from kvblocks.integrations.vllm.sequences import LORA_VERSIONS

_replaced: dict[tuple[Any, str], Any] = {}


class _KVBlocks:
    """Puts the manager into a Scheduler. entrance: where requests wait for the session gate; None: there is no gate."""

    entrance: SchedulerEntrance | None = None
    _is_scheduling = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scheduler: Any = self
        if not scheduler.kv_cache_config.kv_cache_groups:
            return  # a model without a KV cache: vLLM's manager has nothing to manage, and ours no blocks
        try:
            check_scheduler(scheduler)
            scheduler.kv_cache_manager = _make_manager(scheduler)
            if asks_for_hashes(scheduler.vllm_config):  # of whom it was given, which was vLLM's own manager
                scheduler.aux_output_connector = AuxOutputSchedulerConnector(
                    scheduler.kv_cache_manager, scheduler.connector
                )
            # Kernels that can save a state within a chunk (Mamba2) don't have to: chunks end where states are saved.
            scheduler.mamba_has_prefill_checkpoint_blocks = False
        except UnsupportedEngineError as error:
            if not falls_back(scheduler.vllm_config):
                raise
            warnings.warn(f"vLLM's own KV cache manager is used instead of kvblocks: {error}", stacklevel=2)
            return
        if scheduler.connector is not None:
            scheduler.connector.bind_kv_cache_manager(scheduler.kv_cache_manager)
        if scheduler.cache_config.enable_prefix_caching and not _needs_hashes(scheduler):
            _skip_hashing()
        if scheduler.vllm_config.lora_config is not None:
            _watch_loras()
        self.entrance = _make_entrance(scheduler)

    # The session gate.

    def _enqueue_waiting_request(self, request: Any) -> None:
        """Queue a request, unless it waits for the gate."""
        parent: Any = super()
        if self.entrance is None or not self.entrance.holds(request):
            parent._enqueue_waiting_request(request)  # noqa: SLF001

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Queue whom the gate lets in, and then decide on a step as vLLM does."""
        scheduler: Any = self
        parent: Any = super()
        entrance = self.entrance
        if entrance is None:
            return parent.schedule(*args, **kwargs)
        if scheduler.pause_state == PauseState.UNPAUSED:
            num_busy = sum(parent.get_request_counts()) - scheduler.num_waiting_for_streaming_input
            for request in entrance.let_in(num_busy):
                parent._enqueue_waiting_request(request)  # noqa: SLF001
        self._is_scheduling = True
        try:
            step = parent.schedule(*args, **kwargs)
        finally:
            self._is_scheduling = False
        entrance.note_begun(step)
        return step

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Tell the gate how long a step took, and then do as vLLM does."""
        parent: Any = super()
        if self.entrance is not None:
            self.entrance.note_done(scheduler_output)
        return parent.update_from_output(scheduler_output, *args, **kwargs)

    def get_request_counts(self) -> tuple[int, int]:
        """Return how many requests run, and how many wait: also for the gate, except for vLLM's decision on a step."""
        parent: Any = super()
        num_running, num_waiting = parent.get_request_counts()
        num_held = 0 if self.entrance is None or self._is_scheduling else len(self.entrance.held)
        return num_running, num_waiting + num_held

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Tell the gate that a request has ended, and then do as vLLM does."""
        parent: Any = super()
        if self.entrance is not None:
            self.entrance.note_end(request)
        return parent._free_request(request, *args, **kwargs)  # noqa: SLF001

    # Failures and sessions.

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        """Count no token of the next turn as computed.

        If an answer ends amid accepted drafts, vLLM also counts the drafts behind its end. The next turn's first tokens
        would then have the drafts' keys and values.
        """
        session.num_computed_tokens = min(session.num_computed_tokens, session.num_tokens)
        parent: Any = super()
        parent._update_request_as_session(session, update)  # noqa: SLF001

    def _handle_invalid_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Keep blocks that a failed load should have filled out of the cache until they are computed.

        vLLM leaves them cached. A request that comes before they are computed would hit them.
        """
        scheduler: Any = self
        parent: Any = super()
        affected = parent._handle_invalid_blocks(*args, **kwargs)  # noqa: SLF001
        if scheduler.recompute_kv_load_failures and isinstance(scheduler.kv_cache_manager, KVBlocksCacheManager):
            for request_id in affected:
                scheduler.kv_cache_manager.note_failed_load(scheduler.requests[request_id])
        return affected


class KVBlocksScheduler(_KVBlocks, Scheduler):
    """vLLM's `Scheduler` with kvblocks' manager."""


class KVBlocksAsyncScheduler(_KVBlocks, AsyncScheduler):
    """vLLM's `AsyncScheduler` with kvblocks' manager."""


def _make_manager(scheduler: Any) -> KVBlocksCacheManager:
    """Return a manager with the options of a scheduler's own. Raises UnsupportedEngineError."""
    return manager_class(scheduler.kv_cache_config)(
        kv_cache_config=scheduler.kv_cache_config,
        max_model_len=scheduler.max_model_len,
        scheduler_block_size=scheduler.block_size,
        hash_block_size=scheduler.hash_block_size,
        max_in_flight_tokens=scheduler.vllm_config.max_in_flight_tokens,
        enable_caching=scheduler.cache_config.enable_prefix_caching,
        use_eagle=scheduler.use_eagle_block_drop,
        num_prefill_lookahead=scheduler.num_prefill_lookahead,
        log_stats=scheduler.log_stats,
        enable_kv_cache_events=scheduler.enable_kv_cache_events,
        dcp_world_size=scheduler.dcp_world_size,
        metrics_collector=scheduler.kv_metrics_collector,
        watermark=scheduler.scheduler_config.watermark,
        num_hash_lookahead_tokens=getattr(scheduler, "num_hash_lookahead_tokens", 0),  # new in 0.33
        hash_algorithm=scheduler.cache_config.prefix_caching_hash_algo,
        is_asked_for_hashes=asks_for_hashes(scheduler.vllm_config),
    )


def _make_entrance(scheduler: Any) -> SchedulerEntrance | None:
    """Return the entrance of a scheduler that has a manager of ours; None if no gate was asked for."""
    room = gate_option(scheduler.vllm_config)
    if room is None:
        return None
    manager: KVBlocksCacheManager = scheduler.kv_cache_manager
    return SchedulerEntrance(
        SessionGate(room or manager.most_pool_tokens), manager.num_cached, manager.manager.block_size, time.monotonic
    )


def _needs_hashes(scheduler: Any) -> bool:
    """Whether a scheduler's requests have to be hashed, for anyone but a manager of ours.

    Connectors look for KV by hashes, and the connector of auxiliary outputs for the experts of cached tokens.
    """
    return (
        not isinstance(getattr(scheduler, "kv_cache_manager", None), KVBlocksCacheManager)
        or scheduler.connector is not None
        or scheduler.aux_output_connector is not None
    )


def uninstall() -> None:
    """Restore everything that was replaced in memory. Existing schedulers keep working."""
    for owner, name in list(_replaced):
        _put_back(owner, name)


def _engine_core() -> Any:
    """Return the module that makes engine cores; None if nobody has imported it (schedulers alone)."""
    return sys.modules.get("vllm.v1.engine.core")


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    if (owner, name) not in _replaced and hasattr(owner, name):
        _replaced[owner, name] = original = getattr(owner, name)
        setattr(owner, name, make(original))


def _put_back(owner: Any, name: str) -> None:
    original = _replaced.pop((owner, name), None)
    if original is not None:
        setattr(owner, name, original)


def _skip_hashing() -> None:
    """Have the engine core that is being made hash no request.

    An engine core asks for its hasher once, after its scheduler is made. If ours fails before that, or there is none,
    another engine core asks first. That one gets its hasher.
    """
    core = _engine_core()

    def make(original: Any) -> Any:
        @wraps(original)
        def hasher_of_others(*args: Any, **kwargs: Any) -> Any:
            _put_back(core, "get_request_block_hasher")
            asking = sys._getframe(1).f_locals.get("self")  # noqa: SLF001  # the engine core: no argument has it
            hashes = _needs_hashes(getattr(asking, "scheduler", None))
            return original(*args, **kwargs) if hashes else None

        return hasher_of_others

    if core is not None:
        _replace(core, "get_request_block_hasher", make)


def _watch_loras() -> None:
    """Have `LORA_VERSIONS` learn of the adapters that the engine core loads and removes."""
    core = _engine_core()
    if core is not None:
        _replace(core.EngineCore, "add_lora", _telling(LORA_VERSIONS.note_loaded))
        _replace(core.EngineCore, "remove_lora", _telling(LORA_VERSIONS.note_removed))


def _telling(note: Callable[[Any], None]) -> Callable[[Any], Any]:
    """Return a function that wraps a method of one argument, so that `note` gets the argument first.

    The wrapper has the signature of the method, since vLLM decodes a caller's argument by it.
    """

    def make(original: Any) -> Any:
        @wraps(original)
        def told(engine_core: Any, argument: Any) -> Any:
            note(argument)
            return original(engine_core, argument)

        return told

    return make
