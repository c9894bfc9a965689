"""Checks that this transformers has what the integration needs, and that a configuration is supported.

transformers doesn't promise any interface that is used here, so the parts themselves are checked before anything runs:
the calls of its cache and their parameters, what its scheduler and other parts use of the cache, and the order in which
a layer writes and reads. Errors name whatever is missing, or new and unknown. The version only decides whether there is
a warning.
"""

import inspect
import re
from copy import copy
from typing import Any

from kvblocks import UnsupportedEngineError
from kvblocks.integrations import probing
from kvblocks.integrations.transformers.parts import (
    ALLOCATE,
    CACHE,
    GROUPS,
    PROCESS,
    SCHEDULER,
    SECTORS,
    STATE_FIELDS,
    Parts,
)
from kvblocks.integrations.transformers.state_kinds import reason_against, state_types

NAME = "kvblocks.integrations.transformers"
TESTED_VERSIONS = (
    *("5.15.0", "5.15.1", "5.16.0", "5.16.1", "5.17.0"),
    *("5.18.0", "5.19.0", "5.20.2", "5.21.1", "5.22.2", "5.23.0"),
)


def refuse(feature: str, reason: str) -> UnsupportedEngineError:
    """Return the error for a feature that isn't supported."""
    return probing.refuse(NAME, feature, reason)


def check_transformers() -> None:
    """Raise UnsupportedEngineError if a needed part is missing. Warn once about a version that wasn't tested."""
    version = "none"
    try:
        import transformers

        version = str(transformers.__version__)
        missing = missing_parts()
    except (AttributeError, ImportError) as error:  # a part that everything else depends on is missing
        missing = [str(error)]
    expected = f"a transformers with the parts that it uses (tested: {', '.join(TESTED_VERSIONS)})"
    probing.check_parts(NAME, expected, f"{version}, in which differ:", missing)
    if version not in TESTED_VERSIONS:
        probing.warn_untested(NAME, TESTED_VERSIONS, version, "all parts that it uses are there")


def find_parts() -> Parts:
    """Return the parts that this transformers should have, judged by where its allocators are. Raises ImportError."""
    try:
        from transformers.generation.continuous_batching import cache_allocators  # noqa: F401
    except ImportError as error:
        try:
            from transformers.generation.continuous_batching import cache_manager  # noqa: F401
        except ImportError:
            raise error from None
        return GROUPS
    return SECTORS


def missing_parts() -> list[str]:
    """Return the names of missing or changed parts. Raises ImportError for a missing module or class."""
    parts = find_parts()
    modules = _modules(parts)
    problems = []
    for name, calls in parts.calls.items():
        problems += probing.differing_calls(_find_class(modules, name), calls)
    cache = _find_class(modules, CACHE)
    known = {*parts.calls[CACHE], *parts.ignored_calls.split()}
    problems += [
        f"PagedAttentionCache.{name} (unknown)"
        for name, item in vars(cache).items()
        if callable(item) and not name.startswith("_") and name not in known
    ]
    for name in parts.cache_uses:
        problems += _unknown_uses(parts, name, _source_of_uses(modules, name))
    replaced = ("PagedAttentionCache", "resolve_continuous_batching_config", *parts.replaced.split())
    problems += [f"continuous_api.{name}" for name in replaced if not hasattr(modules["continuous_api"], name)]
    fields = getattr(modules["requests"].RequestState, "__dataclass_fields__", {})
    problems += [f"RequestState.{name}" for name in STATE_FIELDS.split() if name not in fields]
    order = _order_in_sectors(modules) if parts is SECTORS else _order_in_groups(modules)
    return problems + order + _order_of_steps(parts, modules)


def _modules(parts: Parts) -> dict[str, Any]:
    """Return, by name, the modules that have the parts or use the cache. Raises ImportError."""
    from transformers.generation.continuous_batching import (
        cache,
        continuous_api,
        input_outputs,
        model_runner,
        offloading_manager,
        requests,
        scheduler,
        utils,
    )

    found = [cache, continuous_api, input_outputs, model_runner, offloading_manager, requests, scheduler, utils]
    if parts is SECTORS:
        from transformers.generation.continuous_batching import cache_allocators as allocators
    else:
        from transformers.generation.continuous_batching import cache_manager as allocators
    return {module.__name__.rpartition(".")[2]: module for module in (*found, allocators)}


def _find_class(modules: dict[str, Any], name: str) -> Any:
    """Return a class by its module's name and its own. Raises AttributeError."""
    module, _, own = name.partition(".")
    return getattr(modules[module], own)


def _source_of_uses(modules: dict[str, Any], name: str) -> str:
    """Return a module's code, without parts that kvblocks replaces."""
    source = inspect.getsource(modules[name])
    replaced = getattr(_find_class(modules, SCHEDULER), ALLOCATE, None)
    return source if replaced is None else source.replace(inspect.getsource(replaced), "")


def _unknown_uses(parts: Parts, name: str, source: str) -> list[str]:
    """Return what a module uses of the cache, its pool or its allocators that kvblocks doesn't know."""
    known = {*parts.cache_uses[name].split(), "py"}  # "cache.py" is a file's name
    used = set(re.findall(r"\b(?:cache|paged_attention_cache)\.((?!__)[a-z_]\w*)", source))
    asked = set(re.findall(rf"\bcache\.{parts.pool}\.(\w+)", source))
    pool = {f"{parts.pool}.{use}" for use in asked - {*parts.pool_uses.split(), "py"}}
    allocators = set(re.findall(r"\b(?:allocator|cache_allocator|ca|cm)\.([a-z_]\w*)", source))
    unknown = (used - known) | pool | (allocators - {*parts.allocator_uses.get(name, "").split()})
    return [f"{name}: cache.{use} (unknown)" for use in sorted(unknown)]


def _order_in_sectors(modules: dict[str, Any]) -> list[str]:
    """Return the differences in the two kinds of allocators."""
    allocators = modules["cache_allocators"]
    full, sliding = allocators.FullAttentionCacheAllocator, allocators.SlidingAttentionCacheAllocator
    problems = _order_of_writes(
        ("FullAttentionCacheAllocator.update", inspect.getsource(full.update)),
        ("SlidingAttentionCacheAllocator.update", inspect.getsource(sliding.update)),
    )
    kinds = {"full_attention": full, "sliding_attention": sliding}
    if getattr(modules["cache"], "ATTN_TYPE_TO_ALLOCATOR", None) != kinds:
        problems.append("ATTN_TYPE_TO_ALLOCATOR")
    return problems


def _order_in_groups(modules: dict[str, Any]) -> list[str]:
    """Return the differences in the branches of the cache's `update`, and in what kvblocks' scheduler relies on."""
    source = inspect.getsource(_find_class(modules, CACHE).update)
    full, _, sliding = source.partition("if sliding_window == 1:")[2].partition("else:")
    problems = _order_of_writes(
        ("PagedAttentionCache.update", full), ("PagedAttentionCache.update of windows", sliding)
    )
    for name, code in ((ALLOCATE, "self.starved_requests.append((state, "), (PROCESS, "return scheduled_requests, ")):
        call = getattr(_find_class(modules, SCHEDULER), name, None)
        if call is not None and code not in inspect.getsource(call):
            problems.append(f"expected Scheduler.{name} with '{code.strip(' (,')}'")
    return problems


def _order_of_writes(full: tuple[str, str], sliding: tuple[str, str]) -> list[str]:
    """Return what differs, by name. Full attention must write before it reads, which early commit relies on."""
    last_write, first_read = full[1].rfind("index_copy_("), full[1].find("index_select(")
    problems = [] if 0 <= last_write < first_read else [full[0]]
    if "sentinel_index" not in sliding[1]:
        problems.append(sliding[0])
    return problems


def _order_of_steps(parts: Parts, modules: dict[str, Any]) -> list[str]:
    """Return what differs. A request with slots must stay in the batch, and must be told of the step's end."""
    problems = []
    source = inspect.getsource(getattr(_find_class(modules, SCHEDULER), PROCESS))
    places = [source.find(step) for step in parts.steps]
    ways_out = [place.start() for place in re.finditer(r"^ +(?:continue|break)\b", source, re.MULTILINE)]
    refused = [place for place in ways_out if places[0] < place < places[1]]  # for requests that got no slots
    if (
        min(places) < 0
        or places != sorted(places)
        or len(refused) != parts.num_ways_out
        or any(places[1] < place < places[-1] for place in ways_out)
    ):
        problems.append("Scheduler._process_candidates")
    source = inspect.getsource(modules["continuous_api"].ContinuousBatchProcessor.update_batch)
    if source.count(f"self.cache.{parts.mark}(state, future_state.complete_blocks)") != 2:
        problems.append("ContinuousBatchProcessor.update_batch")
    return problems


def check_layers(config: Any) -> None:
    """Raise UnsupportedEngineError for a model configuration that has layers with states that kvblocks can't keep.

    Other objects are ignored.
    """
    kinds = state_types(config)
    if not kinds:
        return
    reason = reason_against(config)
    if reason is None and find_parts() is GROUPS:
        reason = "transformers 5.18 and newer alone can be told where their states are"
    if reason is not None:
        name = getattr(config, "model_type", type(config).__name__)
        raise refuse(f"{name}, whose layer_types have {' and '.join(kinds)}", reason)


def step_by_step(config: Any) -> Any:
    """Return a ContinuousBatchingConfig with its open choices made for models with states. Others are returned as is.

    Python code brings the states to the model before each step. So a step is prepared only when the previous one has
    ended, and steps are neither captured nor compiled. Raises UnsupportedEngineError if the config asks for any of
    that.
    """
    if not hasattr(config, "use_async_batching"):
        return config
    asked = {"use_async_batching": config.use_async_batching, "use_cuda_graph": config.use_cuda_graph}
    asked |= {name: getattr(config, name, None) for name in ("varlen_compile_config", "decode_compile_config")}
    for name, value in asked.items():
        if any(value) if isinstance(value, tuple) else value:
            raise refuse(f"{name}={value}", "layers that keep states are computed step by step, by Python code")
    decided = copy(config)
    decided.use_async_batching, decided.use_cuda_graph = False, False
    return decided


def check_config(config: Any) -> None:
    """Raise UnsupportedEngineError if a ContinuousBatchingConfig asks for something unsupported."""
    space = config.cpu_offload_space
    if space is None or space > 0:
        raise refuse(f"cpu_offload_space={space}", "blocks are not copied to the CPU; take 0, the default")
