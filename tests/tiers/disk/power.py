"""Files as they may be after a loss of power, made from what `recorder.c` wrote down.

What a file had at its last flush is there. Of later writes, any sectors are there, in any order. Names are made,
changed and removed in order, and are there at least up to the folder's last flush.
"""

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CREATE, WRITE, TRUNCATE, SYNC, RENAME, UNLINK, OTHER = range(1, 8)
_HEAD = struct.Struct("<IIQQ")


@dataclass
class Event:
    kind: int
    path: str
    offset: int
    data: bytes


@dataclass
class File:
    """flushed: what is there for sure. pending: later changes: (offset, data) for a write, (size, None) for a cut."""

    flushed: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def flush(self) -> None:
        for change in self.pending:
            apply(self.flushed, *change)
        self.pending = []


def apply(content: bytearray, offset: int, data: bytes | None) -> None:
    size = offset if data is None else offset + len(data)
    content.extend(bytes(max(0, size - len(content))))
    if data is None:
        del content[size:]
    else:
        content[offset:size] = data


def read_events(path: Path) -> list[Event]:
    raw, events, at = path.read_bytes(), [], 0
    while at < len(raw):
        kind, name_length, offset, length = _HEAD.unpack_from(raw, at)
        at += _HEAD.size
        name, data = raw[at : at + name_length], raw[at + name_length : at + name_length + length]
        events.append(Event(kind, name.decode(), offset, data))
        at += name_length + length
    return events


class Disk:
    """The files below a folder. names: as the process sees them. flushed_names: as they are on the disk."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.names: dict[str, File] = {}
        self.flushed_names: dict[str, File] = {}
        self.renames: list[tuple[str, File | None]] = []

    def _name(self, path: str, file: File | None) -> None:
        self.renames.append((path, file))
        set_name(self.names, path, file)

    def do(self, event: Event) -> None:
        path = event.path
        if event.kind == OTHER or path.endswith(" (deleted)"):
            raise AssertionError(f"expected nothing but writes to files that have names, got {event.kind} of {path}")
        if event.kind == SYNC and path == self.root:
            for change in self.renames:
                set_name(self.flushed_names, *change)
            self.renames = []
            return
        if event.kind == RENAME:
            file = self.names[path]
            self._name(event.data.decode(), file)
            self._name(path, None)
            return
        if event.kind == UNLINK:
            self._name(path, None)
            return
        if path not in self.names:
            assert event.kind == CREATE, event
            self._name(path, File())
        if event.kind == SYNC:
            self.names[path].flush()
        elif event.kind != CREATE:
            self.names[path].pending.append((event.offset, event.data if event.kind == WRITE else None))

    def content(self, path: str) -> bytes:
        """A file as the process sees it."""
        file = self.names[path]
        content = bytearray(file.flushed)
        for change in file.pending:
            apply(content, *change)
        return bytes(content)

    def after_loss(self, dice: random.Random) -> dict[str, bytes]:
        """The files as they may be when the power goes now."""
        names = dict(self.flushed_names)
        for change in self.renames[: dice.randint(0, len(self.renames))]:
            set_name(names, *change)
        kept, sector = dice.choice([0, 0.1, 0.5, 0.9, 1]), dice.choice([512, 4096])
        found = {}
        for path, file in names.items():
            content = bytearray(file.flushed)
            pieces = [piece for change in file.pending for piece in torn(change, sector) if dice.random() < kept]
            if dice.random() < 0.7:
                dice.shuffle(pieces)
            for piece in pieces:
                apply(content, *piece)
            found[path] = bytes(content)
        return found


def set_name(names: dict[str, File], path: str, file: File | None) -> None:
    names.pop(path, None)
    if file is not None:
        names[path] = file


def torn(change: tuple[int, bytes | None], sector: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield a write, sector by sector."""
    offset, data = change
    if data is None:
        yield change
        return
    at = 0
    while at < len(data):
        end = min(len(data), at + sector - (offset + at) % sector)
        yield offset + at, data[at:end]
        at = end
