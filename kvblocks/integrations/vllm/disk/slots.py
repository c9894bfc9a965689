"""`Slots`: which slot of a disk holds which key, which are being copied, and which is evicted next. Does no I/O.

Invariants:
- A slot is free or belongs to one entry.
- An entry that is being written can't be hit. An entry that is being written or read is not evicted.
- The entries are in the order of their use, the least recently used first.
"""

from collections import OrderedDict
from collections.abc import Iterable

Key = bytes


class Entry:
    """A key's slot. num_readers: loads in progress.

    is_gone: the key was forgotten, and the last copy frees the slot.
    """

    __slots__ = ("is_gone", "is_stored", "key", "num_readers", "slot")

    def __init__(self, key: Key, slot: int, is_stored: bool) -> None:
        self.key = key
        self.slot = slot
        self.is_stored = is_stored
        self.num_readers = 0
        self.is_gone = False


class Slots:
    """Slots 0 to num_slots - 1; `restore` sets what they hold. Not thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._entries: OrderedDict[Key, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def restore(self, pairs: Iterable[tuple[int, Key]]) -> list[int]:
        """Enter what slots hold, the least recently used first. If keys are equal, the last one counts. O(slots).

        Returns the slots whose contents can never be found, because a later slot has the same key.
        """
        lost = []
        for slot, key in pairs:
            old = self._entries.pop(key, None)
            if old is not None:
                lost.append(old.slot)
            self._entries[key] = Entry(key, slot, True)
        taken = {entry.slot for entry in self._entries.values()}
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in taken]
        return lost

    def find(self, key: Key) -> Entry | None:
        """Return the entry of a key, stored or being written. O(1)."""
        return self._entries.get(key)

    def reserve(self, keys: Iterable[Key]) -> tuple[list[Entry], list[Entry]]:
        """Return new entries for keys that have none, as far as there are slots, and the entries evicted for them.

        keys: in the order of a prefix. If there are too few slots, the beginning of the prefix gets them. O(keys +
        entries being copied).
        """
        wanted = dict.fromkeys(keys)
        made: list[Entry] = []
        evicted: list[Entry] = []
        missing = [key for key in wanted if key not in self._entries]
        victims = self._victims(wanted, len(missing) - len(self._free))
        for key in missing:
            if not self._free:
                if not victims:
                    break
                victim = victims.pop()
                self.forget(victim)
                evicted.append(victim)
            entry = Entry(key, self._free.pop(), False)
            self._entries[key] = entry
            made.append(entry)
        self.use(wanted)
        return made, evicted

    def _victims(self, wanted: dict[Key, None], number: int) -> list[Entry]:
        """Return up to `number` entries to evict: the least recently used that are neither copied nor wanted.

        The least recently used entry stands last.
        """
        found: list[Entry] = []
        if number > 0:
            for key, entry in self._entries.items():
                if entry.is_stored and not entry.num_readers and key not in wanted:
                    found.append(entry)
                    if len(found) == number:
                        break
        return found[::-1]

    def use(self, keys: Iterable[Key]) -> None:
        """Note that a prefix is used. keys: in its order; the end is evicted before the beginning. O(keys)."""
        for key in reversed(list(keys)):
            if key in self._entries:
                self._entries.move_to_end(key)

    def stored_slots(self, keys: Iterable[Key]) -> list[int]:
        """Return the slots that hold a prefix's keys, the end of the prefix first. O(keys)."""
        found = [self._entries.get(key) for key in reversed(list(keys))]
        return [entry.slot for entry in found if entry is not None and entry.is_stored]

    def hold(self, entry: Entry) -> None:
        """Keep an entry's slot as it is until `release`. O(1)."""
        entry.num_readers += 1

    def release(self, entry: Entry) -> None:
        """Undo a `hold`. O(1)."""
        entry.num_readers -= 1
        if entry.is_gone and not entry.num_readers:
            self._free.append(entry.slot)

    def forget(self, entry: Entry) -> None:
        """Remove an entry, after which its key has none. A second call does nothing. O(1)."""
        if entry.is_gone:
            return
        entry.is_gone = True
        del self._entries[entry.key]
        if not entry.num_readers:
            self._free.append(entry.slot)
