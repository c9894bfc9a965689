"""Ports for servers that can't choose one themselves, or that need the same one after a restart."""

import secrets
import socket
from contextlib import ExitStack, suppress

_FIRST, _LAST = 10_000, 32_000


def free_ports(count: int) -> list[int]:
    """Return ports of this machine at which nothing listens, all different.

    They are below those that Linux and macOS give to outgoing connections. Otherwise a connection could take one before
    the server does, or during a restart.
    """
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            port, probe = _FIRST + secrets.randbelow(_LAST - _FIRST), stack.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
    return ports
