"""`SharedStore`: blocks in a Valkey or Redis that several servers share, under names that all of them know.

It moves bytes when told to, and asks what is there. It decides nothing, and each call has a time limit. What is read is
checked as a disk's bytes are: nothing in the store is trusted.
"""

from kvblocks.tiers.store.address import StoreAddress, parse_address
from kvblocks.tiers.store.client import StoreError
from kvblocks.tiers.store.store import SharedStore, StoreStats

__all__ = ["SharedStore", "StoreAddress", "StoreError", "StoreStats", "parse_address"]
