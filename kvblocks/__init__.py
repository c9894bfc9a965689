"""kvblocks: exact, hash-chained prefix caching of KV-cache blocks, for LLM engines to import.

    manager = KVCacheManager(num_blocks=4096, block_size=16)
    sequence = Sequence("request-0", prompt_token_ids)
    hit = manager.get_computed_blocks(sequence)
    manager.allocate_slots(sequence, hit=hit)

Public calls check what they are given: see `kvblocks.arguments`. Nothing is checked of the records that they answer
with (CacheStats, PrefixRow, SharedPrefix, Plan and the like) when somebody else makes one.

The core needs no torch, numpy, clock or thread; the reference engine is `kvblocks.engine`, its kernels
`kvblocks.kernels`.
"""

from kvblocks import block
from kvblocks.block import KVCacheBlock
from kvblocks.cache_hit import CacheHit
from kvblocks.errors import (
    BlockStateError,
    CorruptStateError,
    InvalidArgumentError,
    InvalidTokensError,
    KVBlocksError,
    PinBudgetError,
    PoolExhaustedError,
    SequenceStateError,
    StaleHitError,
)
from kvblocks.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from kvblocks.explanation import Explanation
from kvblocks.free_queue import FreeBlockQueue
from kvblocks.groups import FullAttention, Group, SlidingWindow
from kvblocks.manager import KVCacheManager
from kvblocks.metrics import CacheMetrics
from kvblocks.picture import PrefixRow
from kvblocks.pool import BlockPool
from kvblocks.pool_plan import KVLayer, Plan, plan
from kvblocks.prefix_cache import PrefixCache
from kvblocks.prefix_match import PrefixInsert, PrefixMatch
from kvblocks.prefix_pins import PinnedPrefix
from kvblocks.retention import Pin, Refusal
from kvblocks.sequence import Sequence
from kvblocks.shared_prefixes import SharedPrefix
from kvblocks.stats import CacheStats, GroupUsage, MetricsSnapshot, QuotaUsage
from kvblocks.version import __version__

__compiled__: bool = not str(block.__file__).endswith(".py")
"""Whether this is the compiled build of the core (`KVBLOCKS_COMPILE=1 pip install .`).

The two behave alike; docs/design.md has the exceptions.
"""

__all__ = [
    "AllBlocksCleared",
    "BlockPool",
    "BlockRemoved",
    "BlockStateError",
    "BlockStored",
    "CacheEvent",
    "CacheHit",
    "CacheMetrics",
    "CacheStats",
    "CorruptStateError",
    "Explanation",
    "FreeBlockQueue",
    "FullAttention",
    "Group",
    "GroupUsage",
    "InvalidArgumentError",
    "InvalidTokensError",
    "KVBlocksError",
    "KVCacheBlock",
    "KVCacheManager",
    "KVLayer",
    "MetricsSnapshot",
    "Pin",
    "PinBudgetError",
    "PinnedPrefix",
    "Plan",
    "PoolExhaustedError",
    "PrefixCache",
    "PrefixInsert",
    "PrefixMatch",
    "PrefixRow",
    "QuotaUsage",
    "Refusal",
    "Sequence",
    "SequenceStateError",
    "SharedPrefix",
    "SlidingWindow",
    "StaleHitError",
    "__compiled__",
    "__version__",
    "plan",
]
