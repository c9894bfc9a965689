"""The public import path of `CacheMetrics`: see `kvblocks.observe.metrics`."""

from kvblocks.observe.metrics import BLOCK_BOUNDS, SECOND_BOUNDS, CacheMetrics

__all__ = ["BLOCK_BOUNDS", "SECOND_BOUNDS", "CacheMetrics"]
