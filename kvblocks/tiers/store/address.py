"""`StoreAddress`: where a store is and how long to wait for it, read from a URL."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvblocks.arguments import wrong
from kvblocks.errors import InvalidArgumentError

DEFAULT_PORT = 6379

SCHEMES = {
    f"{name}{kind}": (is_tls, bool(kind))
    for name, is_tls in (("valkey", False), ("redis", False), ("valkeys", True), ("rediss", True))
    for kind in ("", "+cluster")
}
"""What URLs begin with, and whether that means TLS and a cluster."""

_COUNTS = {
    "connections": (1, 64),
    "timeout_ms": (1, 3_600_000),
    "lookup_ms": (1, 3_600_000),
    "ttl_s": (1, 2**31 - 1),
    "db": (0, 2**31 - 1),
}
_FILES = ("ca_file", "password_file")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAddress:
    """Where a store is.

    - nodes: hosts and ports: some of a cluster's, or the only one.
    - connections: how many for loads, and as many for stores.
    - timeout_s: the time limit of all calls except lookups, in addition to the time for their bytes.
    - lookup_timeout_s: how long a request may be delayed by asking a store that doesn't answer.
    - ttl_s: how long after its last store the store deletes a block; None: it keeps blocks as long as it can.
    - ca_file: the authority that signs the store's certificates; None: those that the system trusts.
    """

    nodes: tuple[tuple[str, int], ...]
    is_cluster: bool = False
    is_tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    ca_file: str | None = None
    connections: int = 2
    timeout_s: float = 0.5
    lookup_timeout_s: float = 0.1
    ttl_s: int | None = None

    def __str__(self) -> str:
        """Return the address without its password."""
        scheme = ("valkeys" if self.is_tls else "valkey") + ("+cluster" if self.is_cluster else "")
        return f"{scheme}://" + ",".join(f"{host}:{port}" for host, port in self.nodes)


def parse_address(url: str) -> StoreAddress:
    """Return what a URL says: `SCHEME://[USER:PASSWORD@]HOST[:PORT][,HOST:PORT...][/DB][?OPTION=VALUE&...]`.

    Schemes: valkey, redis; with TLS valkeys, rediss; each also with the suffix +cluster. Options: connections,
    timeout_ms, lookup_ms, ttl_s, db, ca_file, password_file. These files are read. Raises InvalidArgumentError, whose
    message never shows a password.
    """
    if not isinstance(url, str) or not url:
        raise wrong("store", "a URL such as 'valkey://host:6379'", type(url))
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        raise InvalidArgumentError(
            f"store: expected a URL that begins with one of {', '.join(SCHEMES)}, and ://, got another"
        )
    is_tls, is_cluster = SCHEMES[scheme]
    # Not by `urlsplit`: it refuses passwords with [ or some letters in them, and its error shows the password.
    front, sharp, _ = rest.partition("#")
    front, _, query = front.partition("?")
    netloc, _, path = front.partition("/")
    login, at, hosts = netloc.rpartition("@")
    if sharp or "@" in path or ("@" in query and not at):
        raise InvalidArgumentError("store: expected / ? # in a name or password as %2F %3F %23, got them unescaped")
    user, _, password = login.partition(":")
    options = _read_options(query)
    counts = {name: _count(name, options[name]) for name in _COUNTS if name in options}
    if path.strip("/"):
        counts["db"] = _count("db", path.strip("/"))
    nodes = tuple(_node(host) for host in hosts.split(","))
    if len(nodes) > 1 and not is_cluster:
        raise InvalidArgumentError(f"store: expected one host, or {scheme}+cluster://, got {len(nodes)} hosts")
    if is_cluster and counts.get("db"):
        raise InvalidArgumentError(f"store: expected db 0, which is all that a cluster has, got {counts['db']}")
    if options.get("ca_file") and not is_tls:
        raise InvalidArgumentError(
            "store: ca_file: expected valkeys:// or rediss://, since only TLS uses it, got neither"
        )
    if options.get("ca_file"):
        _check_certificates(options["ca_file"])
    file = options.get("password_file")
    if file is not None and password:
        raise InvalidArgumentError("store: expected a password in the URL or a password_file, got both")
    return StoreAddress(
        nodes=nodes,
        is_cluster=is_cluster,
        is_tls=is_tls,
        username=_decode(user) or None,
        password=_decode(password) or None if file is None else _read_password(file),
        db=counts.get("db", 0),
        ca_file=options.get("ca_file"),
        connections=counts.get("connections", 2),
        timeout_s=counts.get("timeout_ms", 500) / 1000,
        lookup_timeout_s=counts.get("lookup_ms", 100) / 1000,
        ttl_s=counts.get("ttl_s"),
    )


def _decode(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise InvalidArgumentError("store: expected a name and a password in UTF-8, got other %-escapes") from None


def _read_options(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise InvalidArgumentError("store: expected OPTION=VALUE after ?, got something else") from None
    options = dict(pairs)
    unknown = sorted(options.keys() - _COUNTS.keys() - set(_FILES))
    if unknown or len(options) < len(pairs):
        got = f"{unknown[0]!r}" if unknown else "one twice"
        raise InvalidArgumentError(
            f"store: expected options among {', '.join((*_COUNTS, *_FILES))}, each once, got {got}"
        )
    return options


def _count(name: str, text: str) -> int:
    low, high = _COUNTS[name]
    if not (text.isascii() and text.isdigit() and len(text) < 12 and low <= int(text) <= high):
        raise InvalidArgumentError(f"store: {name}: expected a number from {low} to {high}, got {text!r}")
    return int(text)


def _node(text: str) -> tuple[str, int]:
    """Return host and port. An IPv6 address stands in brackets."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    else:
        host = None if parts.path or parts.query or parts.fragment else host
    if (
        not host
        or any(char.isspace() or not char.isprintable() for char in text)
        or "@" in text
        or port == 0
        or text.endswith(":")
    ):
        raise InvalidArgumentError(f"store: expected HOST or HOST:PORT, with a port from 1 to 65535, got {text!r}")
    return host, DEFAULT_PORT if port is None else port


def _check_certificates(file: str) -> None:
    """Raise InvalidArgumentError for an unreadable file, which would later look like an unreachable store."""
    try:
        ssl.create_default_context().load_verify_locations(file)
    except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
        raise InvalidArgumentError(f"store: ca_file: expected a file of certificates, got {file!r}: {error}") from None


def _read_password(file: str) -> str:
    try:
        password = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"store: password_file: expected a file that can be read, got {error}") from None
    if not password:
        raise InvalidArgumentError(f"store: password_file: expected a password in {file!r}, got nothing")
    return password
