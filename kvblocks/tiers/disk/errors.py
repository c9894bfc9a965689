"""The errors of a disk store."""

import errno
import sqlite3

from kvblocks.errors import KVBlocksError

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
