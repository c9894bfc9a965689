"""How much memory a container leaves to this process, by Linux control groups (cgroups) version 2 and 1.

A group has a limit and a usage, and so has each group above it that the container shows. The tightest one counts. Linux
counts the page cache as usage, but gives it back before it refuses memory. So it counts as free here, as in what Linux
calls available memory.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_CACHE_V2 = ("active_file", "inactive_file")
_CACHE_V1 = ("total_active_file", "total_inactive_file")


@dataclass(frozen=True, slots=True)
class _Version:
    """The files of a group. limits: each may be there; the smallest counts. cache: the page cache's lines of `stat`."""

    limits: tuple[str, ...]
    use: str
    cache: tuple[str, ...]


_V2 = _Version(("memory.max", "memory.high"), "memory.current", _CACHE_V2)
_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", _CACHE_V1)


def free_in_container(root: Path = Path("/")) -> int | None:
    """Bytes that the control groups of this process leave free; None if none of them has a limit. O(groups above).

    root: the folder that contains /proc and /sys. Files that can't be read set no limit.
    """
    found = [free for version, folder in _folders(root) if (free := _free_in(folder, version)) is not None]
    return max(0, min(found)) if found else None


def _folders(root: Path) -> Iterator[tuple[_Version, Path]]:
    """The folders of this process's groups that may limit its memory, and those above them."""
    paths = _group_paths(root)
    for line in _lines(root / "proc/self/mountinfo"):
        # ID PARENT DEVICE ROOT MOUNTPOINT OPTIONS [FIELDS...] - KIND SOURCE SUPEROPTIONS
        front, _, back = line.partition(" - ")
        fields, (kind, *_), options = front.split(), back.split() or [""], back.split()[-1:]
        if kind == "cgroup2":
            version, path = _V2, paths.get("")
        elif kind == "cgroup" and "memory" in options[0].split(","):
            version, path = _V1, paths.get("memory")
        else:
            continue
        if path is None or len(fields) < 5:
            continue
        shown, top = PurePosixPath(_unescaped(fields[3])), root / _unescaped(fields[4]).lstrip("/")
        # Without a namespace of its own, a container sees its group's path on the machine, and a mount that begins
        # there.
        below = path.relative_to(shown) if path.is_relative_to(shown) else PurePosixPath()
        folder = top / below
        yield version, top
        while folder != top and ".." not in folder.parts:
            yield version, folder
            folder = folder.parent


def _group_paths(root: Path) -> dict[str, PurePosixPath]:
    """This process's group by controller; "" stands for version 2."""
    paths: dict[str, PurePosixPath] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            paths[controller] = PurePosixPath(path)
    return paths


def _free_in(folder: Path, version: _Version) -> int | None:
    """Bytes that are left in one group; None without a limit, or if its use isn't known."""
    limits = [limit for name in version.limits if (limit := _number(folder / name)) is not None]
    used = _number(folder / version.use)
    if not limits or used is None:
        return None
    stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    cache = sum(int(stat.get(name, "0")) for name in version.cache)
    return min(limits) - max(0, used - cache)


def _number(file: Path) -> int | None:
    """A file's number; None for "max", and for a file that isn't there."""
    (text, *_) = _lines(file) or [""]
    return int(text) if text.isascii() and text.isdigit() else None


def _lines(file: Path) -> list[str]:
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return []


def _unescaped(path: str) -> str:
    r"""A path of mountinfo, where a blank is \040."""
    for code in ("040", "011", "012", "134"):
        path = path.replace(f"\\{code}", chr(int(code, 8)))
    return path
