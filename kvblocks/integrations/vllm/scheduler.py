"""vLLM's schedulers with kvblocks' manager in place of their own: `--scheduler-cls`.

vLLM's Scheduler names its manager's class itself, so it is replaced behind that constructor. These are replaced in
memory, for as long as it takes: the maker of vLLM's request hasher, which nobody needs any more (once, by the engine
core that has just made its scheduler), and `EngineCore.add_lora` and `remove_lora`, so that an adapter which is loaded
anew gets a new key. `uninstall` takes all back.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvblocks.integrations.vllm.cache_manager import KVBlocksCacheManager
from kvblocks.integrations.vllm.probe import check_config
from kvblocks.integrations.vllm.sequences import LORA_VERSIONS

_replaced: dict[tuple[Any, str], Any] = {}


class _KVBlocks:
    """Puts the manager into a Scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scheduler: Any = self
        check_config(scheduler)
        scheduler.kv_cache_manager = KVBlocksCacheManager(
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
        )
        if scheduler.connector is not None:
            scheduler.connector.bind_kv_cache_manager(scheduler.kv_cache_manager)
        elif scheduler.cache_config.enable_prefix_caching:
            _skip_hashing()
        if scheduler.vllm_config.lora_config is not None:
            _watch_loras()

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        """Count no token of the next turn as computed.

        Where an answer ends amid accepted drafts, vLLM counts those behind its end, too: the next turn's first tokens
        would have the drafts' keys and values.
        """
        session.num_computed_tokens = min(session.num_computed_tokens, session.num_tokens)
        parent: Any = super()
        parent._update_request_as_session(session, update)  # noqa: SLF001

    def _handle_invalid_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Keep what a failed load was to bring out of the cache until it is computed.

        vLLM leaves it cached, so whoever comes before it is computed would hit it.
        """
        scheduler: Any = self
        parent: Any = super()
        affected = parent._handle_invalid_blocks(*args, **kwargs)  # noqa: SLF001
        if scheduler.recompute_kv_load_failures:
            for request_id in affected:
                scheduler.kv_cache_manager.note_failed_load(scheduler.requests[request_id])
        return affected


class KVBlocksScheduler(_KVBlocks, Scheduler):
    """vLLM's Scheduler on kvblocks."""


class KVBlocksAsyncScheduler(_KVBlocks, AsyncScheduler):
    """vLLM's AsyncScheduler on kvblocks."""


def uninstall() -> None:
    """Take back all that was replaced in memory. Schedulers that were made go on."""
    for owner, name in list(_replaced):
        _put_back(owner, name)


def _engine_core() -> Any:
    """Return the module that makes engine cores, None where nobody has imported it (schedulers alone)."""
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
    """Have the engine core that is being made hash no request: it asks for its hasher once, after its scheduler.

    Where another engine core asks first, since ours never came so far or was never meant to, that one gets its hasher.
    """
    core = _engine_core()

    def make(original: Any) -> Any:
        @wraps(original)
        def hasher_of_others(*args: Any, **kwargs: Any) -> Any:
            _put_back(core, "get_request_block_hasher")
            asking = sys._getframe(1).f_locals.get("self")  # noqa: SLF001  # the engine core, which isn't passed
            is_ours = isinstance(getattr(asking, "scheduler", None), _KVBlocks)
            return None if is_ours else original(*args, **kwargs)

        return hasher_of_others

    if core is not None:
        _replace(core, "get_request_block_hasher", make)


def _watch_loras() -> None:
    """Be told which adapters are loaded in place of an older one, and which are removed."""
    core = _engine_core()
    if core is not None:
        _replace(core.EngineCore, "add_lora", _telling(LORA_VERSIONS.note_loaded))
        _replace(core.EngineCore, "remove_lora", _telling(LORA_VERSIONS.note_removed))


def _telling(note: Callable[[Any], None]) -> Callable[[Any], Any]:
    """Return what makes a wrapper of a method of one argument, which `note` is told first.

    The wrapper shows the signature of what it wraps, by which vLLM decodes a caller's argument.
    """

    def make(original: Any) -> Any:
        @wraps(original)
        def told(engine_core: Any, argument: Any) -> Any:
            note(argument)
            return original(engine_core, argument)

        return told

    return make
