"""`Index`: which block each slot holds, in a SQLite file. Commits survive a crash and a loss of power.

The index is never trusted: a slot's own record decides. A file that SQLite can't read is started anew, with a warning.
"""

import logging
import os
import sqlite3
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TypeVar

from kvblocks.tiers.disk.folder import INDEX, Folder
from kvblocks.tiers.disk.layout import MOST_WAL_BYTES, PAGE, Layout
from kvblocks.tiers.identity import BlockIdentity

Row = tuple[object, object, object, object, object]
"""The slot, a number (greater for what was stored or used later), and the parts of an identity.

A damaged file may have other types.
"""

Read = TypeVar("Read")

_LOG = logging.getLogger("kvblocks.tiers.disk")
_TABLE = (
    "CREATE TABLE slots (slot INTEGER PRIMARY KEY, number INTEGER NOT NULL, parent BLOB NOT NULL, keys BLOB NOT NULL, "
    "tokens BLOB NOT NULL)"
)
_MOST_NUMBER = 2**62  # of a row: more than any store reaches
_INSERT = "INSERT OR REPLACE INTO slots VALUES (?, ?, ?, ?, ?)"
_USE = "UPDATE slots SET number = ? WHERE slot = ?"


# Errors that don't mean a damaged file: the disk or the memory failed, or somebody else has the file open.
_ELSEWHERE = frozenset(
    {
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_IOERR),
        *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_INTERRUPT),
    }
)


_FAILURES = sqlite3.Error, UnicodeDecodeError  # the second: Python can't decode SQLite's message about the damage
_Failure = sqlite3.Error | UnicodeDecodeError


class _StrangeError(sqlite3.DatabaseError):
    """A database that isn't one of our indices."""


def _is_damage(error: _Failure) -> bool:
    if isinstance(error, _StrangeError | UnicodeDecodeError):
        return True
    code = getattr(error, "sqlite_errorcode", None)  # None if the sqlite3 module itself refused the call
    return code is not None and code & 0xFF not in _ELSEWHERE


def _as_it_is(row: Row) -> Row:
    return row


class Index:
    """The rows of a folder's index. Its calls raise sqlite3.Error and OSError.

    SQLite's settings: EXCLUSIVE, so that nobody else can open the file and no shared memory is needed; WAL with FULL,
    so that a commit is one fsync, and is on the disk when it returns; secure_delete, which overwrites deleted rows.
    num_slots: rows of slots beyond this number are deleted, since nothing can be read there.
    """

    def __init__(self, folder: Folder, layout: Layout, num_slots: int) -> None:
        self._folder = folder
        self._layout = layout
        self._num_slots = num_slots
        self._next_number = 0
        try:
            self._connection = self._connect()
        except _FAILURES as error:
            if not _is_damage(error):
                raise
            self._connection = self._start_anew(error)
        if self._pragma("page_count") > layout.most_index_pages:  # it was made for more slots
            self._shrink()

    def _pragma(self, text: str) -> int:
        row = self._connection.execute(f"PRAGMA {text}").fetchone()
        return int(row[0]) if row is not None else 0

    def _connect(self) -> sqlite3.Connection:
        os.close(self._folder.open_file(INDEX))  # SQLite gives its log the mode of this file
        path = str(self._folder.path / INDEX)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.text_factory = bytes  # damaged text can still be read
        for setting in (
            *("locking_mode = EXCLUSIVE", f"page_size = {PAGE}", "mmap_size = 0", "temp_store = MEMORY"),
            *("trusted_schema = OFF", "cell_size_check = ON", "secure_delete = ON"),
            *("journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 0"),
        ):
            connection.execute(f"PRAGMA {setting}")
        connection.execute(f"PRAGMA max_page_count = {self._layout.most_index_pages}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        found = connection.execute("SELECT sql FROM sqlite_master").fetchall()
        if not found:
            connection.execute(_TABLE)
        elif found != [(_TABLE.encode(),)]:
            raise _StrangeError("it has other tables than ours")
        beyond = "slot < 0 OR slot >= ?"
        if connection.execute(f"SELECT 1 FROM slots WHERE {beyond}", [self._num_slots]).fetchone():  # noqa: S608
            connection.execute(f"DELETE FROM slots WHERE {beyond}", [self._num_slots])  # noqa: S608
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        last = connection.execute("SELECT max(number) FROM slots").fetchone()[0]
        if last is not None and (not isinstance(last, int) or last > _MOST_NUMBER):
            raise _StrangeError("its rows have other values than ours")
        self._next_number = 0 if last is None else last + 1

    def _start_anew(self, error: _Failure) -> sqlite3.Connection:
        _LOG.warning("%s: starting anew, with nothing in it: SQLite says: %s", self._folder.path / INDEX, error)
        self._folder.remove_index()
        return self._connect()

    def _shrink(self) -> None:
        kept = self.rows(_as_it_is)
        self._connection.close()
        self._folder.remove_index()
        self._connection = self._connect()
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(_INSERT, kept)
        self._connection.execute("COMMIT")

    def rows(self, read: Callable[[Row], Read]) -> list[Read]:
        """Return what `read` makes of each row, in the order of the rows' numbers. O(rows log rows).

        `read` is called row by row, so that few objects are kept: Python's garbage collector scans each kept object
        again and again.
        """
        found: list[Read] = []
        numbers: list[int] = []
        try:
            for row in self._connection.execute("SELECT * FROM slots"):
                found.append(read(row))
                numbers.append(row[1] if isinstance(row[1], int) else 0)
        except _FAILURES as error:
            self._renew(error)
            return []
        return [found[index] for index in sorted(range(len(found)), key=numbers.__getitem__)]

    def _renew(self, error: _Failure) -> None:
        """Start anew if the file is damaged; otherwise raise SQLite's error."""
        if not _is_damage(error):
            raise error
        with suppress(*_FAILURES):
            self._connection.close()
        self._connection = self._start_anew(error)

    def write(self, changes: Mapping[int, BlockIdentity | None], used: Collection[int]) -> None:
        """Commit all changes or none. They are on the disk when the call returns. O((changes + used) log rows).

        used: slots that come last from now on, in this order, if there are rows for them.
        """
        try:
            self._commit(changes, used)
        except _FAILURES as error:
            self._renew(error)
            self._commit(changes, used)
        wal = self._folder.path / (INDEX + "-wal")
        if wal.stat().st_size > MOST_WAL_BYTES:
            self.checkpoint()

    def _commit(self, changes: Mapping[int, BlockIdentity | None], used: Collection[int]) -> None:
        stored = [
            (slot, number, *identity.parts())
            for number, (slot, identity) in enumerate(changes.items(), self._next_number)
            if identity is not None
        ]
        forgotten = [(slot,) for slot, identity in changes.items() if identity is None]
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._connection.executemany("DELETE FROM slots WHERE slot = ?", forgotten)
            self._connection.executemany(_INSERT, stored)
            self._connection.executemany(_USE, enumerate(used, self._next_number + len(changes)))
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        self._next_number += len(changes) + len(used)

    def checkpoint(self) -> None:
        """Move the whole log into the index, and empty the log."""
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the file, and delete its log."""
        self._connection.close()
