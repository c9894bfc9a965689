"""The errors of the wire."""

from kvblocks.arguments import pip_install
from kvblocks.errors import KVBlocksError


class MalformedFrameError(KVBlocksError, ValueError):
    """Received bytes that are not a frame of this wire. They changed nothing."""


class PublisherClosedError(KVBlocksError):
    """Events were given to a closed publisher."""


def missing(package: str, error: ImportError) -> ImportError:
    """Return the error that says how to install a package that the wire needs."""
    return ImportError(f"kvblocks.wire: expected the package {package}, got {error}: {pip_install('wire')}")
