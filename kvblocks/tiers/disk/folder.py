"""`Folder`: the folder of a store: its user, the process that has it open, and its files.

Invariants:

- A folder with files that no DiskStore made is refused, and nothing in it is changed. The error names those files.
- One process has the folder open at a time, from opening to `close`. The lock ends with the process and its forks.
- The marker is written last. So a folder with a marker is complete, and a folder without one is emptied.
- Files have mode 0600, in a folder of mode 0700, of the same user. No file is reached through a link.
- Files of other fingerprints are kept in folders below it (`Archive`).
"""

import errno
import json
import os
import sqlite3
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvblocks.errors import KVBlocksError

LOCK, MARKER, ARENA, INDEX = "kvblocks.lock", "kvblocks.json", "kvblocks.arena", "kvblocks.index"
PARTIAL = MARKER + ".partial"
_INDEX_FILES = tuple(INDEX + ending for ending in ("-wal", "-shm", "-journal", ""))
KEPT = "kvblocks.kept"
SET = frozenset({MARKER, PARTIAL, ARENA, *_INDEX_FILES})
"""The files of one fingerprint."""

_OURS = SET | {LOCK, KEPT}
_OF_A_VOLUME = frozenset({"lost+found"})  # a file system makes it in its own root
_MOST_MARKER_BYTES = 65536
_BLOCK = 512  # bytes; the unit of st_blocks, on every system
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# SQLite tells a full volume from a failed write, but counts a user's quota and a limit of a file's size as the latter.
_NO_ROOM_IN_SQLITE = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE})


class DiskError(KVBlocksError):
    """A folder could not be used: it is full, gone, locked, or not ours. The message says what was expected and got."""


class DiskFullError(DiskError):
    """The volume has no room for what has to be written, and the folder has nothing left to give back."""


def is_full(error: BaseException) -> bool:
    """Whether an error of the system or of SQLite says that there is no room: on the volume, in a quota, in a file."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    if isinstance(error, DiskFullError):
        return True
    return getattr(error, "sqlite_errorcode", None) in _NO_ROOM_IN_SQLITE


def flush(descriptor: int) -> None:
    """Wait until a file's bytes and its size are on the disk. Raises OSError."""
    getattr(os, "fdatasync", os.fsync)(descriptor)  # macOS has no fdatasync


class Folder:
    """An open, locked folder. Creates it if it doesn't exist. Raises DiskError and OSError.

    path: without links. descriptor: that of the folder.
    """

    def __init__(self, path: Path) -> None:
        if not _has_locks():
            raise DiskError(f"{path}: expected a POSIX system, whose locks a disk tier needs, got {os.name}")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path.resolve()
        self._lock: int | None = None
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._check_ours()
            self._take_lock()
            self._narrow()
        except BaseException:
            self.close()
            raise

    def _check_ours(self) -> None:
        owner = os.fstat(self.descriptor).st_uid
        if owner != os.geteuid():
            raise DiskError(f"{self.path}: expected a folder of user {os.geteuid()}, got one of user {owner}")
        foreign = sorted(self._names() - _OURS - _OF_A_VOLUME)
        if foreign:
            shown = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
            raise DiskError(
                f"{self.path}: expected an empty folder, or one that a DiskStore made; got one with {shown}"
            )

    def _names(self) -> set[str]:
        with os.scandir(self.descriptor) as entries:
            return {entry.name for entry in entries}

    def _narrow(self) -> None:
        """Take away the rights of other users."""
        os.fchmod(self.descriptor, 0o700)
        with os.scandir(self.descriptor) as entries:
            for name in [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]:
                os.chmod(name, 0o600, dir_fd=self.descriptor)  # Path can't use a folder's descriptor

    def _take_lock(self) -> None:
        import fcntl  # POSIX only; imported here, so that only a disk tier needs it

        self._lock = self.open_file(LOCK)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 20, 0).decode("ascii", "replace").strip() or "one that is opening it"
            raise DiskError(f"{self.path}: expected a folder that nobody uses, got one of process {owner}") from None
        with suppress(OSError):  # on a full volume the process's number can't be written, but the lock holds
            os.pwrite(self._lock, f"{os.getpid():<19}\n".encode(), 0)

    def open_file(self, name: str) -> int:
        """Return a descriptor of one of our files, to read and write. Creates a missing file. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise DiskError(f"{self.path / name}: expected a file, got something else")
        return descriptor

    def sync(self) -> None:
        """Wait until the names of the files are on the disk. Raises OSError."""
        os.fsync(self.descriptor)

    def read_marker(self) -> dict[str, Any] | None:
        """Return what the folder was made for; None if there is no readable marker."""
        try:
            descriptor = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            try:
                marker = json.loads(file.read(_MOST_MARKER_BYTES))
            except (ValueError, RecursionError, OSError):
                return None
        return marker if isinstance(marker, dict) else None

    def write_marker(self, marker: dict[str, Any]) -> None:
        """Write what the folder is made for, completely or not at all. Raises OSError."""
        with os.fdopen(self.open_file(PARTIAL), "r+b") as file:
            file.truncate()
            file.write(json.dumps(marker, indent=2).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(PARTIAL, MARKER, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        self.sync()

    def num_taken_bytes(self) -> int:
        """Return how many bytes its files take on their volume. Raises OSError."""
        found = [Path(at, name) for at, _, names in os.walk(self.path) for name in names]
        return sum([path.lstat().st_blocks for path in found]) * _BLOCK

    def num_free_bytes(self) -> int:
        """Return how many bytes its user has left on the volume. Raises OSError."""
        found = os.fstatvfs(self.descriptor)
        return found.f_bavail * found.f_frsize

    def is_used(self) -> bool:
        """Whether there is anything in it besides the lock and what is kept. Raises OSError."""
        return bool(self._names() & SET)

    def empty(self) -> None:
        """Delete our files except the lock, the marker first. Raises OSError."""
        self._remove(MARKER, PARTIAL)
        self.remove_index()
        self._remove(ARENA)

    def remove_index(self) -> None:
        """Delete the index, and what SQLite keeps beside it. Raises OSError."""
        self._remove(*_INDEX_FILES)

    def _remove(self, *names: str) -> None:
        for name in names:
            try:
                os.unlink(name, dir_fd=self.descriptor)
            except FileNotFoundError:
                continue
        self.sync()

    def check_there(self, arena: int) -> None:
        """Raise DiskError if the arena or the index was removed, because all later writes would be lost. O(1)."""
        try:
            found = os.stat(ARENA, dir_fd=self.descriptor, follow_symlinks=False)
            os.stat(INDEX, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            found = None
        if found is None or not os.path.samestat(found, os.fstat(arena)):
            raise DiskError(f"{self.path}: expected the files that were opened, got a folder without them")

    def close(self) -> None:
        """Unlock the folder. A second call does nothing."""
        for descriptor in (self._lock, self.descriptor):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._lock, self.descriptor = None, -1


def _has_locks() -> bool:
    """Whether the system has POSIX's locks."""
    try:
        import fcntl  # noqa: F401
    except ImportError:
        return False
    return True
