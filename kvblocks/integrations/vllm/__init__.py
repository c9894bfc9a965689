"""kvblocks as the KV cache manager of vLLM v1.

    vllm serve MODEL --scheduler-cls kvblocks.integrations.vllm.KVBlocksAsyncScheduler

`DiskTier` is a secondary tier of vLLM's offloading, under vLLM's own schedulers or these. docs/integrations/vllm.md
says what is served, what is refused, and how it was tested.
"""

from typing import TYPE_CHECKING, Any

from kvblocks.integrations.vllm.probe import check_vllm

if TYPE_CHECKING:
    from kvblocks.integrations.vllm.disk import DiskTier

check_vllm()  # before imports of vLLM's names that may be missing

from kvblocks.integrations.vllm.cache_manager import KVBlocksCacheManager  # noqa: E402
from kvblocks.integrations.vllm.scheduler import (  # noqa: E402
    KVBlocksAsyncScheduler,
    KVBlocksScheduler,
    uninstall,
)

__all__ = ["DiskTier", "KVBlocksAsyncScheduler", "KVBlocksCacheManager", "KVBlocksScheduler", "uninstall"]


def __getattr__(name: str) -> Any:
    """Import the tier when it is asked for, since an older vLLM has no tiers."""
    if name != "DiskTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvblocks.integrations.vllm.disk import DiskTier

    return DiskTier
