"""`SharedStore`: blocks in a Valkey or Redis that several servers share, under names that all of them know.

Moves bytes when told, and asks what is there; it decides nothing, and never waits beyond a bound. What is found is
checked as a disk's: nothing there is trusted.
"""

from kvblocks.tiers.store.address import StoreAddress, parse_address
from kvblocks.tiers.store.errors import StoreError
from kvblocks.tiers.store.stats import StoreStats
from kvblocks.tiers.store.store import SharedStore

__all__ = ["SharedStore", "StoreAddress", "StoreError", "StoreStats", "parse_address"]
