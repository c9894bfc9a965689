"""kvblocks as the KV cache manager of vLLM v1.

    vllm serve MODEL --scheduler-cls kvblocks.integrations.vllm.KVBlocksAsyncScheduler

docs/integrations/vllm.md says what is served, what is refused, and how it was tested.
"""

from kvblocks.integrations.vllm.probe import check_vllm

check_vllm()  # before anything of vLLM's is imported that may not be there

from kvblocks.integrations.vllm.cache_manager import KVBlocksCacheManager  # noqa: E402
from kvblocks.integrations.vllm.scheduler import (  # noqa: E402
    KVBlocksAsyncScheduler,
    KVBlocksScheduler,
    uninstall,
)

__all__ = ["KVBlocksAsyncScheduler", "KVBlocksCacheManager", "KVBlocksScheduler", "uninstall"]
