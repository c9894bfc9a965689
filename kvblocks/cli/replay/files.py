"""Checks of the files that a command will write, before it spends time on their contents."""

from contextlib import suppress
from itertools import combinations
from os.path import realpath
from pathlib import Path
from tempfile import TemporaryFile

from kvblocks.errors import InvalidArgumentError


def check_can_write(path: Path | None, option: str) -> None:
    """Raise InvalidArgumentError if a file can't be written. Call it before an hour is spent on the contents.

    Creates a file as a test and deletes it.
    """
    if path is None:
        return
    try:
        if (path.exists() and not path.is_file()) or not path.parent.is_dir():
            raise InvalidArgumentError(f"{option}: expected a file in a folder that exists, got {path}")
        with suppress(FileNotFoundError):
            path.lstat()  # its name may be too long
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InvalidArgumentError(
            f"{option}: expected a file that can be written, got {path}: {error.strerror}"
        ) from error


def check_differ(paths: dict[str, Path | None]) -> None:
    """Raise InvalidArgumentError if two of these are the same file, since one would overwrite the other.

    paths: by option name; None for options that weren't given. Links are resolved.
    """
    given = [(name, path) for name, path in paths.items() if path is not None]
    for (name, path), (other_name, other) in combinations(given, 2):
        is_one = realpath(path) == realpath(other)
        with suppress(OSError):  # one doesn't exist, or can't be read: other checks report that
            is_one = is_one or path.samefile(other)
        if is_one:
            raise InvalidArgumentError(f"{other_name}: expected another file than {name}, got {other} for both")
