"""The errors of a store."""

from kvblocks.errors import KVBlocksError


class StoreError(KVBlocksError):
    """A store can't be reached, or didn't answer in time. The message says expected and got."""


class StoreRefusedError(StoreError):
    """A store answered with a refusal: it is full or read-only, or this user may not run the command."""
