"""`DiskStore`: the bytes of a persistent tier in a folder, and what its slots hold, for the next process to take back.

Moves bytes when told, with no thread and no decision of its own: an engine carries out the transfers that its manager
wants, hands what `tiers.take_changes` says to `remember`, and calls `sync` every second.
"""

from kvblocks.tiers.disk.errors import DiskError
from kvblocks.tiers.disk.layout import DiskStats
from kvblocks.tiers.disk.store import DiskStore

__all__ = ["DiskError", "DiskStats", "DiskStore"]
