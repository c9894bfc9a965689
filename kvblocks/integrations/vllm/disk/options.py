"""`Options`: the configuration of a tier, which vLLM passes on from a JSON object."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from kvblocks import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a `DiskTier`.

    root_dir: a folder for this tier alone; created if it doesn't exist. max_bytes: the most bytes of all files in it,
    for each data-parallel rank. n_read_threads, n_write_threads: threads that move bytes. prefix_caching_hash_algo: as
    vLLM's option of this name. weights: any text that distinguishes weights with the same name, such as a revision or
    quantization. secret_file: a file with at least 16 bytes; nobody without them can plant KV. enable_kv_events:
    whether vLLM's KV events, if it has any, include stores and evictions. locality: "LOCAL" or "REMOTE", for vLLM's
    filters.
    """

    root_dir: Path
    max_bytes: int
    n_read_threads: int = 4
    n_write_threads: int = 4
    prefix_caching_hash_algo: str = "sha256"
    weights: str = ""
    secret_file: Path | None = None
    enable_kv_events: bool = False
    locality: str | None = None

    def read_secret(self) -> bytes | None:
        """Return the contents of `secret_file` without the line's end, or None. Raises InvalidArgumentError."""
        if self.secret_file is None:
            return None
        try:
            return self.secret_file.read_bytes().rstrip(b"\r\n")
        except OSError as error:
            _refuse("secret_file", "a file that can be read", f"{str(self.secret_file)!r}: {error.strerror}")


def read_options(given: Mapping[str, Any]) -> Options:
    """Read a configuration. Raises InvalidArgumentError."""
    names = [field.name for field in fields(Options)]
    unknown = sorted(set(given) - set(names))
    if unknown:
        _refuse("options", f"some of {', '.join(names)}", ", ".join(unknown))
    for name in ("root_dir", "max_bytes"):
        if name not in given:
            _refuse(name, "a value, since it has no default", "none")
    found = dict(given)
    for name in ("root_dir", "secret_file"):
        if name in given and (name == "root_dir" or given[name] is not None):
            found[name] = _path(name, given[name])
    for name in ("max_bytes", "n_read_threads", "n_write_threads"):
        if type(given.get(name, 1)) is not int or given.get(name, 1) < 1:
            _refuse(name, "an int of at least 1", repr(given[name]))
    for name in ("prefix_caching_hash_algo", "weights"):
        if not isinstance(given.get(name, ""), str):
            _refuse(name, "a text", repr(given[name]))
    if type(given.get("enable_kv_events", False)) is not bool:
        _refuse("enable_kv_events", "true or false", repr(given["enable_kv_events"]))
    if given.get("locality") not in (None, "LOCAL", "REMOTE"):
        _refuse("locality", "a Locality ('LOCAL' or 'REMOTE'), or none", repr(given["locality"]))
    return Options(**found)


def _path(name: str, value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        _refuse(name, "a path", repr(value))
    return Path(value)


def _refuse(name: str, expected: str, got: str) -> NoReturn:
    raise InvalidArgumentError(f"DiskTier: {name}: expected {expected}, got {got}")
