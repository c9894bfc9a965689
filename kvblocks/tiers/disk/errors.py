"""The error of a disk store."""

from kvblocks.errors import KVBlocksError


class DiskError(KVBlocksError):
    """A folder could not be used: it is full, gone, locked, or not ours. The message says expected and got."""
