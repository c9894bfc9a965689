"""The errors of the wire."""

from kvblocks.errors import KVBlocksError


class MalformedFrameError(KVBlocksError, ValueError):
    """Bytes from outside that are no frame of this wire: what was received is worth nothing, and changed nothing."""


class PublisherClosedError(KVBlocksError):
    """Events were given to a publisher that is closed."""


def missing(package: str, error: ImportError) -> ImportError:
    """Return the error that says how to install a package that the wire needs."""
    return ImportError(f"kvblocks.wire: expected the package {package}, got {error}: pip install 'kvblocks[wire]'")
