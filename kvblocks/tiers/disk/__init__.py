"""`DiskStore`: keeps the bytes of a persistent tier in a folder, and which block each slot holds, across processes.

It moves bytes when told to, has no thread, and decides nothing. An engine carries out the transfers that its manager
wants, passes the answers of `tiers.take_changes` to `remember` and those of `tiers.take_uses` to `note_used`, and calls
`sync` every second.
"""

from kvblocks.tiers.disk.folder import DiskError, DiskFullError
from kvblocks.tiers.disk.layout import DiskStats
from kvblocks.tiers.disk.store import DiskStore

__all__ = ["DiskError", "DiskFullError", "DiskStats", "DiskStore"]
