"""kvblocks: exact, hash-chained prefix caching of KV-cache blocks, for LLM engines to import.

    manager = KVCacheManager(num_blocks=4096, block_size=16)
    sequence = Sequence("request-0", prompt_token_ids)
    hit = manager.get_computed_blocks(sequence)
    manager.allocate_slots(sequence, hit=hit)

The folders:

- `kvblocks.hashing`: extra keys and digests of blocks;
- `kvblocks.core`: one group of layers with full attention, and all that exactness needs;
- `kvblocks.retention`: which blocks stay cached;
- `kvblocks.observe`: metrics, explanations and pictures for people;
- `kvblocks.tiers`: copies of blocks below the device;
- `kvblocks.prefix_cache`: for engines that own their block ids;
- `kvblocks.gate`: lets sessions take turns, so that their prompts fit the cache;
- `kvblocks.wire`: events for routers, and hints of orchestrators;
- `kvblocks.replay`: traces through the manager, and `kvblocks.verify`: checks of any block manager or server;
- `kvblocks.integrations`: inside other engines;
- `kvblocks.engine`: the reference engine, with its kernels in `kvblocks.kernels`; `kvblocks.server`: its API;
- `kvblocks.cli`: the command line.

Public calls check their arguments: see `kvblocks.arguments`. The classes of records that calls return (CacheStats,
PrefixRow, SharedPrefix, Plan and the like) check nothing.

The names below are imported when they are first used (PEP 562), so a caller who needs only a block table loads nothing
else. None of them needs torch, numpy, a clock or a thread.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvblocks.core.block import KVCacheBlock
    from kvblocks.core.free_queue import FreeBlockQueue
    from kvblocks.core.hit import CacheHit
    from kvblocks.core.kinds import (
        ChunkedLocal,
        FullAttention,
        Group,
        RecurrentState,
        Scratch,
        SlidingWindow,
        StateInPlace,
        kind_of_layers,
    )
    from kvblocks.core.manager_states import ManagerStates
    from kvblocks.core.plan import KVLayer, LatentLayer, Plan, StateLayer, plan
    from kvblocks.core.pool import BlockPool
    from kvblocks.core.sequence import Sequence
    from kvblocks.core.state_copy import StateCopy
    from kvblocks.errors import (
        BlockStateError,
        CorruptStateError,
        InvalidArgumentError,
        InvalidTokensError,
        KVBlocksError,
        NoTokensError,
        PinBudgetError,
        PoolExhaustedError,
        SequenceStateError,
        StaleHitError,
        UnsupportedEngineError,
    )
    from kvblocks.events import AllBlocksCleared, BlockRemoved, BlocksHit, BlockStored, CacheEvent, EventOptions
    from kvblocks.manager import KVCacheManager
    from kvblocks.observe.explanation import Explanation
    from kvblocks.observe.inspector import HeldBlocks, Inspector
    from kvblocks.observe.metrics import CacheMetrics
    from kvblocks.observe.picture import PrefixRow
    from kvblocks.observe.removal_history import Removal
    from kvblocks.observe.shared_prefixes import SharedPrefix
    from kvblocks.prefix_cache.cache import PrefixCache
    from kvblocks.prefix_cache.inspector import CacheInspector
    from kvblocks.prefix_cache.match import PrefixInsert, PrefixMatch
    from kvblocks.prefix_cache.pins import PinnedPrefix
    from kvblocks.prefix_cache.protocol import PrefixCacheProtocol
    from kvblocks.retention.holds import BlockHold, BlockHolds
    from kvblocks.retention.manager_pins import ManagerPins
    from kvblocks.retention.manager_quotas import ManagerQuotas
    from kvblocks.retention.pins import Pin
    from kvblocks.retention.policies.policy import CacheView, EvictionPolicy, FreeBlock, PolicyFactory
    from kvblocks.retention.sessions import Sessions
    from kvblocks.stats import (
        CacheStats,
        GroupUsage,
        MetricsSnapshot,
        QuotaUsage,
        Refusal,
        StateStats,
        TierPart,
        TierStats,
    )
    from kvblocks.tiers.hit import TierHit
    from kvblocks.tiers.identity import BlockIdentity
    from kvblocks.tiers.tier import Tier
    from kvblocks.tiers.tiers import Tiers
    from kvblocks.tiers.transfer import Loaded, Transfer
    from kvblocks.version import __version__

    __compiled__: bool
    """Whether this is the compiled build of the core (`KVBLOCKS_COMPILE=1 pip install .`).

    Both builds behave alike; docs/design/builds-and-invariants.md lists the exceptions.
    """

# The module of each public name; a test compares it with the imports above.
_HOMES = {
    "core.block": ("KVCacheBlock",),
    "core.free_queue": ("FreeBlockQueue",),
    "core.hit": ("CacheHit",),
    "core.pool": ("BlockPool",),
    "core.sequence": ("Sequence",),
    "errors": (
        "BlockStateError",
        "CorruptStateError",
        "InvalidArgumentError",
        "InvalidTokensError",
        "KVBlocksError",
        "NoTokensError",
        "PinBudgetError",
        "PoolExhaustedError",
        "SequenceStateError",
        "StaleHitError",
        "UnsupportedEngineError",
    ),
    "events": ("AllBlocksCleared", "BlockRemoved", "BlockStored", "BlocksHit", "CacheEvent", "EventOptions"),
    "core.kinds": (
        "ChunkedLocal",
        "FullAttention",
        "Group",
        "RecurrentState",
        "Scratch",
        "SlidingWindow",
        "StateInPlace",
        "kind_of_layers",
    ),
    "core.plan": ("KVLayer", "LatentLayer", "Plan", "StateLayer", "plan"),
    "core.manager_states": ("ManagerStates",),
    "core.state_copy": ("StateCopy",),
    "manager": ("KVCacheManager",),
    "observe.explanation": ("Explanation",),
    "observe.inspector": ("HeldBlocks", "Inspector"),
    "observe.metrics": ("CacheMetrics",),
    "observe.picture": ("PrefixRow",),
    "observe.removal_history": ("Removal",),
    "observe.shared_prefixes": ("SharedPrefix",),
    "prefix_cache.cache": ("PrefixCache",),
    "prefix_cache.inspector": ("CacheInspector",),
    "prefix_cache.match": ("PrefixInsert", "PrefixMatch"),
    "prefix_cache.pins": ("PinnedPrefix",),
    "prefix_cache.protocol": ("PrefixCacheProtocol",),
    "retention.holds": ("BlockHold", "BlockHolds"),
    "retention.manager_pins": ("ManagerPins",),
    "retention.manager_quotas": ("ManagerQuotas",),
    "retention.pins": ("Pin",),
    "retention.policies.policy": ("CacheView", "EvictionPolicy", "FreeBlock", "PolicyFactory"),
    "retention.sessions": ("Sessions",),
    "tiers.identity": ("BlockIdentity",),
    "tiers.tier": ("Tier",),
    "tiers.tiers": ("Tiers",),
    "tiers.hit": ("TierHit",),
    "tiers.transfer": ("Loaded", "Transfer"),
    "stats": (
        "CacheStats",
        "GroupUsage",
        "MetricsSnapshot",
        "QuotaUsage",
        "Refusal",
        "StateStats",
        "TierPart",
        "TierStats",
    ),
    "version": ("__version__",),
}
# Modules that can be had as attributes, as if they had been imported.
_SUBMODULES = {"arguments", "core", "errors", "events", "hashing", "manager", "metrics", "observe", "prefix_cache"}
_SUBMODULES |= {"retention", "stats", "tiers", "version"}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AllBlocksCleared",
    "BlockHold",
    "BlockHolds",
    "BlockIdentity",
    "BlockPool",
    "BlockRemoved",
    "BlockStateError",
    "BlockStored",
    "BlocksHit",
    "CacheEvent",
    "CacheHit",
    "CacheInspector",
    "CacheMetrics",
    "CacheStats",
    "CacheView",
    "ChunkedLocal",
    "CorruptStateError",
    "EventOptions",
    "EvictionPolicy",
    "Explanation",
    "FreeBlock",
    "FreeBlockQueue",
    "FullAttention",
    "Group",
    "GroupUsage",
    "HeldBlocks",
    "Inspector",
    "InvalidArgumentError",
    "InvalidTokensError",
    "KVBlocksError",
    "KVCacheBlock",
    "KVCacheManager",
    "KVLayer",
    "LatentLayer",
    "Loaded",
    "ManagerPins",
    "ManagerQuotas",
    "ManagerStates",
    "MetricsSnapshot",
    "NoTokensError",
    "Pin",
    "PinBudgetError",
    "PinnedPrefix",
    "Plan",
    "PolicyFactory",
    "PoolExhaustedError",
    "PrefixCache",
    "PrefixCacheProtocol",
    "PrefixInsert",
    "PrefixMatch",
    "PrefixRow",
    "QuotaUsage",
    "RecurrentState",
    "Refusal",
    "Removal",
    "Scratch",
    "Sequence",
    "SequenceStateError",
    "Sessions",
    "SharedPrefix",
    "SlidingWindow",
    "StaleHitError",
    "StateCopy",
    "StateInPlace",
    "StateLayer",
    "StateStats",
    "Tier",
    "TierHit",
    "TierPart",
    "TierStats",
    "Tiers",
    "Transfer",
    "UnsupportedEngineError",
    "__compiled__",
    "__version__",
    "kind_of_layers",
    "plan",
]


def __getattr__(name: str) -> object:
    value: object
    if name == "__compiled__":
        value = not str(import_module("kvblocks.core.block").__file__).endswith(".py")
    elif name in _MODULES:
        value = vars(import_module(f"kvblocks.{_MODULES[name]}"))[name]
    elif name in _SUBMODULES:
        return import_module(f"kvblocks.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
