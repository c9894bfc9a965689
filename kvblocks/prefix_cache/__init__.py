"""A prefix cache for engines that own their KV and choose their own block ids: `PrefixCache`, in `cache`."""

from kvblocks.prefix_cache.cache import PrefixCache

__all__ = ["PrefixCache"]
