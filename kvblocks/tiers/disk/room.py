"""`Room`: keeps a store's folder within its budget, and gives back bytes when its volume is full."""

import logging
import threading

from kvblocks.tiers.disk.archive import Archive
from kvblocks.tiers.disk.arena import Arena
from kvblocks.tiers.disk.folder import Folder
from kvblocks.tiers.disk.layout import Layout

_LOG = logging.getLogger("kvblocks.tiers.disk")


class Room:
    """The space that an open folder may take. Any thread may call it. Raises OSError.

    max_bytes: the budget of all files. The index of the set in use has its own part of it; the arena and the archive
    share the rest.
    """

    def __init__(self, folder: Folder, layout: Layout, arena: Arena, archive: Archive, max_bytes: int) -> None:
        self._folder = folder
        self._layout = layout
        self._arena = arena
        self._archive = archive
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards the archive, and the next attribute
        self._end = 0  # up to which byte the arena may be written
        self._cover(max(1, arena.num_bytes))

    def cover(self, slot: int) -> None:
        """Allow the arena to be written up to this slot's end. The archive shrinks if need be. O(1) on average."""
        self._cover(self._layout.offset(slot + 1))

    def _cover(self, end: int) -> None:
        if end > self._end:
            with self._lock:
                self._archive.shrink(self._archive.num_bytes - (self._layout.offset(self._layout.num_slots) - end))
                self._end = max(end, self._end)

    def give_back(self, num_bytes: int) -> range | None:
        """Give back this many bytes, if possible: first the archive's, then the arena's last blocks.

        Returns the slots that hold nothing now; None if there was nothing to give back.
        """
        with self._lock:
            before = self._archive.num_bytes
            self._archive.shrink(num_bytes)
            given = before - self._archive.num_bytes
            lost = range(0) if given >= num_bytes else self._arena.cut(num_bytes - given)
        if lost:
            words = "its volume is full: what has to be written takes the place of its last"
            _LOG.warning("%s: %s %d slots", self._folder.path, words, len(lost))
        return lost if lost or given else None

    def erase_archive(self) -> None:
        """Overwrite and remove the whole archive. O(bytes)."""
        with self._lock:
            self._archive.erase()

    def warn_if_little(self) -> None:
        """Warn if the volume has less room than the folder may take, because writes would then fail one day."""
        taken, free = self._folder.num_taken_bytes(), self._folder.num_free_bytes()
        if taken + free < self._max_bytes:
            _LOG.warning(
                "%s: expected room for its whole size, %d bytes, got a volume with %d, of which %d are free: when it is"
                " full, nothing more is stored; choose a smaller size",
                *(self._folder.path, self._max_bytes, taken + free, free),
            )
