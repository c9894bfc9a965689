"""Which names a request's Host header may have, and which addresses only the machine itself can reach.

A web page can make its own name resolve to 127.0.0.1 (DNS rebinding). Then it can send requests to a server on its
reader's machine as if that were its own server, but the Host header still has the page's name.
"""

import ipaddress
import re
from collections.abc import Collection, Sequence

from kvblocks.server.errors import ApiError

_NAME = r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?"
_HOST = re.compile(rf"(?P<name>{_NAME})\.?(?::\d*)?|\[(?P<address>[0-9a-f:.]+)\](?::\d*)?")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. False for any name but localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_host(name: str) -> bool:
    """Whether a text is a name or an address in the form of a Host header, without port and brackets."""
    lower = name.lower()
    try:
        ipaddress.ip_address(lower)
    except ValueError:
        return re.fullmatch(_NAME, lower) is not None
    return True


class HostCheck:
    """Allows requests whose Host header names this machine's loopback or one of `allowed`.

    Port and case don't matter.
    """

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(_normalize(name) for name in allowed)

    def check(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Raise ApiError 403 for another Host, several, or none."""
        values = [value.decode("latin-1").strip().lower() for name, value in headers if name == b"host"]
        match = _HOST.fullmatch(values[0]) if len(values) == 1 else None
        name = None if match is None else _normalize(match["name"] or match["address"])
        if name is None or not (is_loopback(name) or name in self._allowed):
            got = ascii(values[0])[:100] if len(values) == 1 else f"{len(values) or 'none'} of them"
            raise ApiError(
                403,
                f"expected a Host header with localhost, a loopback address or a name of --allowed-host, got {got}",
                code="host_not_allowed",
            )


def _normalize(host: str) -> str:
    """Return a host in lower case, and an IPv6 address in its shortest form."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower().rstrip(".")
