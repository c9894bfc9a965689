"""`Archive`: what a store's folder keeps for other fingerprints: other models, block sizes, dtypes or threads.

A server that comes back to a former configuration finds its blocks again. All sets of files share one budget. As the
set in use grows, the set that was used longest ago gives way: its arena is cut at its end, and blocks that were there
are misses. A set without an arena is removed.

Invariants: a set with a marker is complete; one without is removed. Sets are moved by renaming, so nothing is copied.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvblocks.tiers.disk.arena import overwrite
from kvblocks.tiers.disk.folder import ARENA, KEPT, MARKER, PARTIAL, SET, DiskError, Folder

_LEAST_CUT_SHARE = 32  # an arena is cut by at least this part of it, so that it isn't cut for each block


class Archive:
    """The other sets of files in an open folder. Not thread-safe. Raises OSError, and DiskError for foreign files.

    num_bytes: the length of all their files together.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._sets: dict[str, int] = {}  # by name, its bytes; the one that was used longest ago comes first
        ages: dict[str, float] = {}
        for name in self._listed(KEPT):
            where = f"{KEPT}/{name}"
            foreign = sorted(self._listed(where) - SET)
            if foreign:
                raise DiskError(f"{folder.path / where}: expected files of a DiskStore, got {foreign[0]}")
            self._sets[name] = self._size(where)
            with suppress(FileNotFoundError), self._open(where) as there:
                ages[name] = os.stat(MARKER, dir_fd=there, follow_symlinks=False).st_mtime
        for name in self._sets.keys() - ages.keys():
            self._remove(name)  # a move that a crash interrupted
        self._sets = {name: self._sets[name] for name in sorted(ages, key=ages.__getitem__)}

    @property
    def num_bytes(self) -> int:
        """The length of all files together, in bytes."""
        return sum(self._sets.values())

    def put_away(self, marker: dict[str, Any]) -> None:
        """Move the folder's set, which has this marker, to the archive."""
        name = _name(marker)
        if name in self._sets:
            self._remove(name)
        top = self._folder.descriptor
        for path in (KEPT, f"{KEPT}/{name}"):
            with suppress(FileExistsError):
                os.mkdir(path, 0o700, dir_fd=top)
        with self._open(f"{KEPT}/{name}") as there:
            _move(MARKER, PARTIAL, top, there)  # from here on neither place has a complete set
            for file in SET - {MARKER, PARTIAL}:
                _move(file, file, top, there)
            _move(PARTIAL, MARKER, there, there)
            os.utime(MARKER, dir_fd=there)
            os.fsync(there)
        self._folder.sync()
        self._sets[name] = self._size(f"{KEPT}/{name}")

    def take_back(self, marker: dict[str, Any]) -> bool:
        """Move the set with this marker to the folder, which has none. Returns whether there was one."""
        name = _name(marker)
        if name not in self._sets:
            return False
        with self._open(f"{KEPT}/{name}") as there:
            for file in SET - {MARKER, PARTIAL}:
                _move(file, file, there, self._folder.descriptor)
            _move(MARKER, MARKER, there, self._folder.descriptor)
        self._remove(name)
        self._folder.sync()
        return True

    def shrink(self, num_bytes: int) -> None:
        """Give back at least this many bytes, or all, first those of the set that was used longest ago. O(sets)."""
        while num_bytes > 0 and self._sets:
            name = next(iter(self._sets))
            before = self._sets[name]
            with self._open(f"{KEPT}/{name}") as there:
                left = _cut(there, num_bytes)
            if left:
                self._sets[name] = self._size(f"{KEPT}/{name}")
            else:
                self._remove(name)
            num_bytes -= before - self._sets.get(name, 0)

    def erase(self) -> None:
        """Overwrite and remove all sets. This takes no room on the disk. O(bytes)."""
        for name in [*self._sets]:
            with self._open(f"{KEPT}/{name}") as there:
                for file in sorted(SET, key=lambda file: file == MARKER):
                    with suppress(FileNotFoundError):
                        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=there)
                        try:
                            overwrite(descriptor, 0, os.fstat(descriptor).st_size)
                            os.fsync(descriptor)
                        finally:
                            os.close(descriptor)
            self._remove(name)

    # Helpers.

    def _remove(self, name: str) -> None:
        with self._open(f"{KEPT}/{name}") as there:
            for file in (MARKER, *SET):
                with suppress(FileNotFoundError):
                    os.unlink(file, dir_fd=there)
        os.rmdir(f"{KEPT}/{name}", dir_fd=self._folder.descriptor)
        self._sets.pop(name, None)

    @contextmanager
    def _open(self, path: str) -> Iterator[int]:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, dir_fd=self._folder.descriptor)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _listed(self, path: str) -> set[str]:
        try:
            with self._open(path) as there, os.scandir(there) as entries:
                return {entry.name for entry in entries}
        except FileNotFoundError:
            return set()

    def _size(self, path: str) -> int:
        with self._open(path) as there, os.scandir(there) as entries:
            return sum([entry.stat(follow_symlinks=False).st_size for entry in entries])


def _name(marker: dict[str, Any]) -> str:
    """Return the name of the set with this marker."""
    return hashlib.sha256(json.dumps(marker, sort_keys=True).encode()).hexdigest()[:16]


def _move(file: str, new: str, source: int, target: int) -> None:
    with suppress(FileNotFoundError):
        os.rename(file, new, src_dir_fd=source, dst_dir_fd=target)


def _cut(there: int, num_bytes: int) -> int:
    """Cut a set's arena at its end, by at least this many bytes or to nothing. Return its new length."""
    try:
        arena = os.open(ARENA, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=there)
    except FileNotFoundError:
        return 0
    try:
        size = os.fstat(arena).st_size
        left = max(0, size - max(num_bytes, size // _LEAST_CUT_SHARE))
        os.ftruncate(arena, left)
        return left
    finally:
        os.close(arena)
