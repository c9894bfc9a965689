"""`install` and `uninstall`: replace names in transformers' module in memory, and restore them."""

from collections.abc import Callable
from typing import Any, Literal

from transformers.generation.continuous_batching import continuous_api

from kvblocks import InvalidArgumentError
from kvblocks.integrations.transformers.bookkeeping import Bookkeeping
from kvblocks.integrations.transformers.parts import SECTORS
from kvblocks.integrations.transformers.probe import check_config, check_layers, find_parts

KVBlocksPagedCache: type[Bookkeeping]
if find_parts() is SECTORS:
    from kvblocks.integrations.transformers import cache as sectors

    KVBlocksPagedCache, schedulers = sectors.KVBlocksPagedCache, sectors.schedulers
else:
    from kvblocks.integrations.transformers import grouped_cache as groups

    KVBlocksPagedCache, schedulers = groups.KVBlocksPagedCache, groups.schedulers

_CACHE, _RESOLVE = "PagedAttentionCache", "resolve_continuous_batching_config"
_originals: dict[str, Any] = {}


def install(*, commit: Literal["early", "late"] = "early", debug: bool = False) -> type[Bookkeeping]:
    """Have continuous batching that starts from now on use kvblocks. Returns the class of its cache.

    commit: "early" caches a prompt when it is scheduled, wherever keys and values are written before they are read;
    "late" always caches after the step. debug: check the whole manager after every change, which is slow. A second call
    replaces the options. Running managers of transformers stay as they are. Raises InvalidArgumentError.
    """
    if commit not in ("early", "late"):
        raise InvalidArgumentError(f"install: commit: expected 'early' or 'late', got {commit!r}")
    made = type("KVBlocksPagedCache", (KVBlocksPagedCache,), {"commit": commit, "debug": bool(debug)})
    if not _originals:
        replaced = {_RESOLVE: _checked(getattr(continuous_api, _RESOLVE)), **schedulers()}
        _originals.update({name: getattr(continuous_api, name) for name in (_CACHE, *replaced)})
        for name, ours in replaced.items():
            setattr(continuous_api, name, ours)
    setattr(continuous_api, _CACHE, made)
    return made


def uninstall() -> None:
    """Undo `install`. Running managers go on with kvblocks."""
    for name, original in _originals.items():
        setattr(continuous_api, name, original)
    _originals.clear()


def _checked(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' call that completes a configuration, so that it refuses bad ones in the caller's thread."""

    def resolve_and_check(*args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            check_layers(given)
        config = resolve(*args, **kwargs)
        check_config(config)
        return config

    return resolve_and_check
