"""`DiskStore`: keeps the bytes of a persistent tier in a folder, and which block each slot holds.

Invariants:

- `read` accepts a block only if the slot's own record names this block and its checksum is right.
- The index never names bytes that are not on the disk: `sync` flushes the arena, then commits the index.
- All files together never exceed max_bytes, including those that are kept for other fingerprints (`Archive`).

The folder is a cache. If it can't be used, it is emptied with a warning; it never gives wrong bytes. If its volume is
full, opening and erasing, which have to write, take their room from the arena's last blocks.
"""

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsIndex

from kvblocks.arguments import check_count, is_a, listed, wrong
from kvblocks.errors import InvalidArgumentError
from kvblocks.tiers.disk.archive import Archive
from kvblocks.tiers.disk.arena import Arena
from kvblocks.tiers.disk.complaints import Complaints
from kvblocks.tiers.disk.folder import ARENA, DiskError, DiskFullError, Folder, is_full
from kvblocks.tiers.disk.index import Index, Row
from kvblocks.tiers.disk.layout import MOST_KEY_BYTES, DiskStats, Layout
from kvblocks.tiers.disk.room import Room
from kvblocks.tiers.identity import NUM_DIGEST_BYTES, BlockIdentity
from kvblocks.tiers.sealing import FORMAT, Payload, Sealer

_LOG = logging.getLogger("kvblocks.tiers.disk")
_NOTHING = BlockIdentity(b"", b"", b"")
_MARK = "a disk tier of kvblocks"
_LEAST_GIVEN, _ATTEMPTS = 2**20, 8  # on a full volume: bytes given back at first, then twice as many, so many times
_BYTES_LEFT = "expected a disk that can be written (bytes of blocks are left, in the arena)"
_ROWS_LEFT = "expected room for the index (the blocks' bytes are gone, their tokens are left; free some bytes there)"


class DiskStore:
    """Slots on a disk, for the blocks of one tier.

    - folder: a folder that nothing else uses. It is created if it doesn't exist, and refused if it holds other files.
    - fingerprint: 32 bytes that name what made the blocks' bytes: model, weights, dtype, groups and layout of KV.
    - num_block_bytes: bytes of a block.
    - block_size: tokens of a block of the primary group.
    - max_bytes: the most bytes of all files in the folder together.
    - secret: at least 16 bytes; a block that was written without it is then a miss. None: records only show damage.

    What was stored with other values (except max_bytes), or in another format, is kept below the folder for a store
    with those values, as long as there is room.

    `write` and `read` of different slots may run at the same time, also while `remember` and `sync` run. `close` must
    be the last call. Raises InvalidArgumentError; DiskError if the folder can't be used, or another store uses it;
    DiskFullError if its volume has no room even for an empty store.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        fingerprint: bytes,
        num_block_bytes: SupportsIndex,
        block_size: SupportsIndex,
        max_bytes: SupportsIndex,
        secret: bytes | None = None,
    ) -> None:
        given: Any = folder
        path = Path(given) if is_a(given, str) or isinstance(given, os.PathLike) else None
        if path is None or not _is_path(str(given)):
            raise wrong("DiskStore: folder", "a path", folder)
        self._sealer = Sealer(fingerprint, secret)
        self._block_size = check_count("DiskStore: block_size", block_size, 1)
        num_bytes = check_count("DiskStore: num_block_bytes", num_block_bytes, 1)
        most = check_count("DiskStore: max_bytes", max_bytes, 1)
        self._layout = Layout(num_bytes, self._block_size, most)
        self.num_slots = self._layout.num_slots
        """How many blocks fit."""
        self._stats = DiskStats()
        self._complaints = Complaints()
        self._lock = threading.Lock()  # guards the attributes below and the counters; not held during I/O
        self._changes: dict[int, BlockIdentity | None] = {}
        self._used: dict[int, None] = {}
        self._is_unflushed = False
        self._is_closed = False
        self._syncing = threading.Lock()  # guards the index; taken before `_lock`
        with _as_disk_error(f"DiskStore: {path}: expected a folder to read and write"):
            self._open(path, most)

    @property
    def stats(self) -> DiskStats:
        """Counters since the store was opened."""
        with self._lock:
            return self._stats

    @property
    def needs_sync(self) -> bool:
        """Whether `sync` has bytes or changes to put on the disk. A new order of use alone doesn't count."""
        with self._lock:
            return self._is_unflushed or bool(self._changes)

    @property
    def has_uses(self) -> bool:
        """Whether `sync` has a new order of use to put on the disk."""
        with self._lock:
            return bool(self._used)

    def remembered(self) -> list[tuple[int, BlockIdentity]]:
        """Return which slots hold which blocks, as far as that is on the disk, the least recently stored or used first.

        The answer is what `manager.tiers.restore` takes. The blocks' bytes are not read. Raises DiskError. O(slots log
        slots).
        """
        with self._syncing, _as_disk_error("DiskStore.remembered: expected a disk that can be read"):
            self._check_open("remembered")
            found = self._index.rows(self._read_row)
        good = [pair for pair in found if pair is not None]
        if len(good) < len(found):
            self._note_damage(len(found) - len(good), f"{len(found) - len(good)} rows of the index are no blocks")
        return good

    def write(self, slots: Iterable[SupportsIndex], identities: Iterable[BlockIdentity], payload: Payload) -> None:
        """Write blocks. They are on the disk after the next `sync`.

        payload: the blocks' bytes one after another, num_block_bytes each, in any C-contiguous buffer. Raises
        InvalidArgumentError, and DiskError if not all were written; then call `complete(transfer, ok=False)`. If a
        block has more than 512 bytes of extra keys, the call raises DiskError and writes nothing. O(bytes).
        """
        pairs = self._check_blocks("write", slots, identities)
        if len({slot for slot, _ in pairs}) < len(pairs):
            raise wrong("DiskStore.write: slots", "each slot once", [slot for slot, _ in pairs])
        data = self._check_buffer("write: payload", payload, len(pairs))
        size = self._layout.num_block_bytes
        with self._counting_failures("num_failed_writes"), _as_disk_error("DiskStore.write: expected room on the disk"):
            self._check_open("write")
            for _, identity in pairs:
                if len(identity.extra_keys) > MOST_KEY_BYTES:
                    got = len(identity.extra_keys)
                    raise DiskError(f"DiskStore.write: expected at most {MOST_KEY_BYTES} bytes of keys, got {got}")
            self._folder.check_there(self._arena.descriptor)
            self._room.cover(max([slot for slot, _ in pairs], default=0))
            try:
                for number, (slot, identity) in enumerate(pairs):
                    self._arena.write(slot, identity, data[number * size : (number + 1) * size])
            finally:
                with self._lock:
                    self._is_unflushed = True
        self._count(num_written_blocks=len(pairs), num_written_bytes=len(data))

    def read(self, slots: Iterable[SupportsIndex], identities: Iterable[BlockIdentity], out: Payload) -> int:
        """Fill a buffer with blocks, and return how many of them, from the first, are right.

        The rest of the buffer means nothing. Reading ends at a block that isn't what was asked for, which is counted
        and logged rather than raised. out: a writable buffer, laid out as for `write`. Raises InvalidArgumentError, and
        DiskError after `close`. O(bytes).
        """
        pairs = self._check_blocks("read", slots, identities)
        data = self._check_buffer("read: out", out, len(pairs))
        if data.readonly:
            raise wrong("DiskStore.read: out", "a buffer that can be written", type(out))
        self._check_open("read")
        size = self._layout.num_block_bytes
        number = 0
        for slot, identity in pairs:
            try:
                is_right = self._arena.read(slot, identity, data[number * size : (number + 1) * size])
                reason = "expected the block that was stored there, got other bytes, or none"
            except OSError as error:
                is_right, reason = False, str(error)
            if not is_right:
                self._note_damage(1, f"slot {slot}: {reason}")
                break
            number += 1
        self._count(num_read_blocks=number, num_read_bytes=number * size)
        return number

    def remember(self, changes: Mapping[int, BlockIdentity | None]) -> None:
        """Record what `manager.tiers.take_changes` returned for this tier.

        changes: by slot, the block that it holds; None: no block. After the next `sync` either all of it is on the disk
        or nothing is. Raises InvalidArgumentError. O(changes).
        """
        given: Any = changes
        if not isinstance(given, Mapping):
            raise wrong("DiskStore.remember", "a dict of slots, and a BlockIdentity or None", changes)
        checked = [(self._check_slot("remember", slot), identity) for slot, identity in given.items()]
        for _, identity in checked:
            if identity is not None:
                self._check_identity("remember", identity)
        with self._lock:
            self._check_open_locked("remember")
            for slot, identity in checked:
                is_too_long = identity is not None and len(identity.extra_keys) > MOST_KEY_BYTES
                self._used.pop(slot, None)
                self._changes.pop(slot, None)  # so that it is entered last
                self._changes[slot] = None if is_too_long else identity

    def note_used(self, slots: Iterable[SupportsIndex]) -> None:
        """Record slots that were used, the latest used one last. `remembered` then returns them last.

        For a prefix that was used, its last slot is enough for `manager.tiers.restore`. The order is on the disk after
        the next `sync`; if it gets lost, nothing else does. Raises InvalidArgumentError. O(slots).
        """
        checked = [self._check_slot("note_used", slot) for slot in listed("DiskStore.note_used", "slots", slots)]
        with self._lock:
            self._check_open_locked("note_used")
            for slot in checked:
                self._used.pop(slot, None)
                self._used[slot] = None

    def sync(self) -> None:
        """Put everything that was written and remembered before the call on the disk: first the bytes, then the index.

        Call it every second while `needs_sync`. When it returns, forgotten blocks are gone for good. If it raises
        DiskError, nothing is lost except what the disk lost, and the next call tries again. O(what is new).
        """
        with self._syncing, self._counting_failures("num_failed_syncs"):
            self._check_open("sync")
            self._sync()

    def erase(self, slots: Iterable[SupportsIndex]) -> None:
        """Forget slots, overwrite their bytes, and delete their rows of the index. All is on the disk when it returns.

        For data that must go, so everything kept for other fingerprints is erased too. Copies that the file system or
        the device makes on its own are not reached. Overwriting takes no room. The index and its log need some; on a
        full volume they get that of the arena's last blocks. Raises InvalidArgumentError, and DiskError, which says
        what is left; in that case call it again. If the process ends meanwhile, the slots are forgotten, unless the
        volume was full. O(bytes).
        """
        checked = [self._check_slot("erase", slot) for slot in listed("DiskStore.erase", "slots", slots)]
        with self._syncing, self._counting_failures("num_failed_writes"):
            self._check_open("erase")
            with self._lock:
                self._changes.update(dict.fromkeys(checked))
                self._is_unflushed = True
            with suppress(DiskError):  # tried again below, with room
                self._sync()  # so that nothing finds the blocks if the process ends while their bytes are overwritten
            with _as_disk_error(f"DiskStore.erase: {_BYTES_LEFT}"):
                self._arena.erase(checked)
                self._room.erase_archive()
            with _as_disk_error(f"DiskStore.erase: {_ROWS_LEFT}"):
                self._with_room(self._sync_whole)

    def _sync_whole(self) -> None:
        """`_sync`, and leave nothing in the index's log."""
        self._sync()
        self._index.checkpoint()

    def close(self) -> None:
        """Call `sync`, then unlock the folder. A second call does nothing. Raises DiskError if the sync did."""
        with self._syncing:
            if self._is_closed:
                return
            try:
                with self._counting_failures("num_failed_syncs"):
                    self._sync()
            finally:
                with self._lock:
                    self._is_closed = True
                self._close_files()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Opening and closing.

    def _open(self, path: Path, max_bytes: int) -> None:
        self._folder = Folder(path)
        try:
            marker = {
                "kvblocks": _MARK,
                "format": FORMAT,
                "num_block_bytes": self._layout.num_block_bytes,
                "block_size": self._block_size,
                "fingerprint": self._sealer.fingerprint.hex(),
                "secret": self._sealer.seal(_NOTHING, b"").hex(),  # tells secrets apart without showing them
            }
            archive = Archive(self._folder)
            self._choose_files(marker, archive)
            self._arena = Arena(self._folder.open_file(ARENA), self._layout, self._sealer)
            self._room = Room(self._folder, self._layout, self._arena, archive, max_bytes)
            self._with_room(self._open_index)
            if self._folder.read_marker() != marker:
                self._with_room(lambda: self._folder.write_marker(marker))
            self._room.warn_if_little()
        except BaseException:
            self._close_files()
            raise

    def _choose_files(self, marker: dict[str, object], archive: Archive) -> None:
        """Put away files that were made for another configuration, and take back those that were made for this one."""
        found = self._folder.read_marker()
        if found == marker:
            return
        if found is None:
            if self._folder.is_used():
                _LOG.warning("%s: emptied: %s", self._folder.path, _difference(marker, found))
        else:
            try:
                archive.put_away(found)
                _LOG.warning("%s: kept for its return: %s", self._folder.path, _difference(marker, found))
            except OSError as error:
                _LOG.warning("%s: emptied: %s; and %s", self._folder.path, _difference(marker, found), error)
        self._folder.empty()
        if archive.take_back(marker):
            _LOG.warning("%s: found again what was stored with these options before", self._folder.path)

    def _open_index(self) -> None:
        self._index = Index(self._folder, self._layout, min(self.num_slots, self._arena.num_slots))

    def _with_room(self, write: Callable[[], object]) -> None:
        """Call a function that writes. While the volume is full, give bytes back, and call it again."""
        for attempt in range(_ATTEMPTS):
            try:
                write()
            except (OSError, sqlite3.Error, DiskFullError) as error:
                lost = self._room.give_back(_LEAST_GIVEN << attempt) if is_full(error) else None
                if lost is None:
                    raise
                with self._lock:
                    self._changes.update(dict.fromkeys(lost))
            else:
                return
        write()

    def _close_files(self) -> None:
        """Close the open files, the lock last, so that nobody can take the folder before all is closed."""
        index, arena = getattr(self, "_index", None), getattr(self, "_arena", None)
        try:
            if index is not None:
                index.close()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            self._complaints.warn("close", f"{self._folder.path}: the index could not be closed: {error}")
        finally:
            if arena is not None:
                arena.close()
            self._folder.close()

    def _check_open(self, call: str) -> None:
        with self._lock:
            self._check_open_locked(call)

    def _check_open_locked(self, call: str) -> None:
        if self._is_closed:
            raise DiskError(f"DiskStore.{call}: expected an open store, got one that was closed")

    # Syncing.

    def _sync(self) -> None:
        """Flush the arena, then commit. The changes are taken before the flush, so that their bytes are flushed too."""
        with self._lock:
            changes, self._changes = self._changes, {}
            used, self._used = self._used, {}
            is_unflushed, self._is_unflushed = self._is_unflushed, False
        try:
            with _as_disk_error("DiskStore.sync: expected a disk that can be written"):
                self._folder.check_there(self._arena.descriptor)
                if is_unflushed:
                    self._flush(changes)
                    is_unflushed = False
                if changes or used:
                    self._index.write(changes, used)
        except BaseException:
            with self._lock:
                self._changes = {slot: changes[slot] for slot in changes if slot not in self._changes} | self._changes
                self._used = {slot: None for slot in used if slot not in self._used} | self._used
                self._is_unflushed = self._is_unflushed or is_unflushed
            raise
        self._count(num_syncs=1, num_synced_blocks=sum([identity is not None for identity in changes.values()]))

    def _flush(self, changes: dict[int, BlockIdentity | None]) -> None:
        try:
            self._arena.flush()
        except OSError:
            changes.update(dict.fromkeys(changes))  # the bytes may be lost, and the next flush wouldn't report it
            raise

    # Checks of arguments.

    def _check_slot(self, call: str, slot: SupportsIndex) -> int:
        return check_count(f"DiskStore.{call}: slot", slot, 0, self.num_slots - 1)

    def _check_identity(self, call: str, identity: object) -> BlockIdentity:
        given: Any = identity
        if not is_a(given, BlockIdentity):
            raise wrong(f"DiskStore.{call}", "a BlockIdentity", identity)
        own: BlockIdentity = given
        if not self._is_identity(own):
            expected = f"a BlockIdentity of {self._block_size} tokens after b'' or a SHA-256 digest, or in a column"
            raise wrong(f"DiskStore.{call}", expected, identity)
        return own

    def _is_identity(self, identity: BlockIdentity) -> bool:
        """Whether a block of this size may have this identity."""
        if identity.column:
            return len(identity.parent) == NUM_DIGEST_BYTES and not identity.extra_keys and not identity.tokens
        return len(identity.parent) in (0, NUM_DIGEST_BYTES) and len(identity.tokens) == self._layout.num_token_bytes

    def _check_blocks(
        self, call: str, slots: Iterable[SupportsIndex], identities: Iterable[BlockIdentity]
    ) -> list[tuple[int, BlockIdentity]]:
        places = [self._check_slot(call, slot) for slot in listed(f"DiskStore.{call}: slots", "slots", slots)]
        given = listed(f"DiskStore.{call}: identities", "BlockIdentity, one a slot", identities)
        if len(given) != len(places):
            raise InvalidArgumentError(
                f"DiskStore.{call}: expected {len(places)} identities, one a slot; got {len(given)}"
            )
        return [(slot, self._check_identity(call, one)) for slot, one in zip(places, given, strict=True)]

    def _check_buffer(self, name: str, buffer: Payload, number: int) -> memoryview:
        expected = f"a C-contiguous buffer of {number} x {self._layout.num_block_bytes} bytes"
        try:
            view = memoryview(buffer)
            if not view.c_contiguous or view.nbytes != number * self._layout.num_block_bytes:
                got = f"{view.nbytes} bytes" + ("" if view.c_contiguous else ", not contiguous")
                raise InvalidArgumentError(f"DiskStore.{name}: expected {expected}, got {got}")
            return view.cast("B")
        except (TypeError, BufferError):
            raise wrong(f"DiskStore.{name}", expected, type(buffer)) from None

    def _read_row(self, row: Row) -> tuple[int, BlockIdentity] | None:
        """Return what a row of the index says; None if no call of `remember` could have written it."""
        slot, number, parent, keys, tokens = row
        if not isinstance(slot, int) or not isinstance(number, int) or not 0 <= slot < self.num_slots:
            return None
        if not isinstance(parent, bytes) or not isinstance(keys, bytes) or not isinstance(tokens, bytes):
            return None
        identity = BlockIdentity.of_parts(parent, keys, tokens)
        if len(keys) > MOST_KEY_BYTES or not self._is_identity(identity):
            return None
        return slot, identity

    # Counters.

    def _count(self, **more: int) -> None:
        with self._lock:
            self._count_locked(more)

    def _count_locked(self, more: Mapping[str, int]) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + more[name] for name in more})

    def _note_damage(self, number: int, message: str) -> None:
        self._count(num_damaged_blocks=number)
        self._complaints.warn("damage", f"{self._folder.path}: {message}: not used")

    @contextmanager
    def _counting_failures(self, name: str) -> Iterator[None]:
        try:
            yield
        except DiskError as error:
            self._count(**{name: 1})
            self._complaints.warn(name, str(error))
            raise


@contextmanager
def _as_disk_error(expected: str) -> Iterator[None]:
    """Turn errors of the system and of SQLite into a DiskError."""
    try:
        yield
    except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
        kind = DiskFullError if is_full(error) else DiskError
        raise kind(f"{expected}, got {error}") from error


def _difference(marker: Mapping[str, object], found: Mapping[str, object] | None) -> str:
    """Say how a folder's marker differs from ours."""
    if found is None:
        return "expected a marker that says what it was made for, got none"
    others = [name for name in marker if found.get(name) != marker[name]]
    values = [f"{name} {marker[name]!r}, got {found.get(name)!r}" for name in others if name != "secret"]
    return "expected " + ("; ".join(values) or "the secret that it was made with, got another")


def _is_path(text: str) -> bool:
    """Whether a system could have a file of this name."""
    try:
        return bool(os.fsencode(text)) and "\0" not in text
    except UnicodeEncodeError:
        return False
