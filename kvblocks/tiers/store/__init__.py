"""`SharedStore`: blocks in a Valkey or Redis that several servers share, under names that all of them know.

It moves bytes when told to, and asks what is there. It decides nothing, and each call has a time limit. What is read is
checked as a disk's bytes are: nothing in the store is trusted. An engine opens one with `parse_address`, a `Sealer` for
its fingerprint, and `open_clients`; `RecentUses` says which uses it need not report again.
"""

from kvblocks.tiers.sealing import LEAST_SECRET_BYTES, Sealer
from kvblocks.tiers.store.address import SCHEMES, StoreAddress, parse_address
from kvblocks.tiers.store.client import StoreError, open_clients
from kvblocks.tiers.store.recent import RecentUses
from kvblocks.tiers.store.store import Owner, SharedStore, StoreStats

__all__ = [
    "LEAST_SECRET_BYTES",
    "SCHEMES",
    "Owner",
    "RecentUses",
    "Sealer",
    "SharedStore",
    "StoreAddress",
    "StoreError",
    "StoreStats",
    "open_clients",
    "parse_address",
]
