"""`install` and `uninstall`: replace names in transformers' module in memory, and restore them."""

from collections.abc import Callable
from operator import index
from typing import Any, Literal, SupportsIndex

from transformers.generation.continuous_batching import continuous_api

from kvblocks import InvalidArgumentError
from kvblocks.integrations.transformers.bookkeeping import Bookkeeping
from kvblocks.integrations.transformers.parts import SECTORS
from kvblocks.integrations.transformers.probe import check_config, check_layers, find_parts, step_by_step
from kvblocks.integrations.transformers.state_kinds import state_types

KVBlocksPagedCache: type[Bookkeeping]
if find_parts() is SECTORS:
    from kvblocks.integrations.transformers import cache as sectors

    KVBlocksPagedCache, replacements = sectors.KVBlocksPagedCache, sectors.replacements
else:
    from kvblocks.integrations.transformers import grouped_cache as groups

    KVBlocksPagedCache, replacements = groups.KVBlocksPagedCache, groups.replacements

_CACHE, _RESOLVE = "PagedAttentionCache", "resolve_continuous_batching_config"
_originals: dict[tuple[Any, str], Any] = {}


def install(
    *, commit: Literal["early", "late"] = "early", debug: bool = False, num_state_slots: SupportsIndex | None = None
) -> type[Bookkeeping]:
    """Make continuous batching that starts from now on use kvblocks. Returns the class of its cache.

    commit: "early" caches a prompt when it is scheduled, wherever keys and values are written before they are read;
    "late" always caches after the step. debug: check the whole manager after every change, which is slow.
    num_state_slots: for how many requests at once there are states, in models whose layers keep some; None: 64, or
    fewer, so that they take no more memory than keys and values, and are no more than the requests of a batch. A second
    call replaces the options. Running managers of transformers stay as they are. Raises InvalidArgumentError.
    """
    if commit not in ("early", "late"):
        raise InvalidArgumentError(f"install: commit: expected 'early' or 'late', got {commit!r}")
    num_slots = None if num_state_slots is None else index(num_state_slots)
    if num_slots is not None and num_slots < 1:
        raise InvalidArgumentError(f"install: num_state_slots: expected at least 1, got {num_slots}")
    options = {"commit": commit, "debug": bool(debug), "num_state_slots": num_slots}
    made = type("KVBlocksPagedCache", (KVBlocksPagedCache,), options)
    if not _originals:
        _replace(continuous_api, _RESOLVE, _checked(getattr(continuous_api, _RESOLVE)))
        for module, name, ours in replacements():
            _replace(module, name, ours)
    _replace(continuous_api, _CACHE, made)
    return made


def uninstall() -> None:
    """Undo `install`. Running managers go on with kvblocks."""
    for (module, name), original in _originals.items():
        setattr(module, name, original)
    _originals.clear()


def _replace(module: Any, name: str, ours: Any) -> None:
    _originals.setdefault((module, name), getattr(module, name))
    setattr(module, name, ours)


def _checked(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' call that completes a configuration, so that it refuses bad ones in the caller's thread."""

    def resolve_and_check(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        for each in given:
            check_layers(each)
        has_states = any(state_types(each) for each in given)
        if has_states:
            args = tuple(step_by_step(each) for each in args)
            kwargs = {name: step_by_step(each) for name, each in kwargs.items()}
        config = resolve(*args, **kwargs)
        check_config(config)
        return step_by_step(config) if has_states else config

    return resolve_and_check
