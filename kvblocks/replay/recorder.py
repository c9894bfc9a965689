"""Records requests as a trace for `kvblocks replay`. For engine authors, and for `kvblocks serve --record`.

There is one line of JSON per request, which `kvblocks.replay.readers` describes. No text and no token leaves the
process. A block is named by a keyed hash of its tokens and all before them, and tenants and sessions are named by keyed
hashes, too. The key is random, and lost when the process ends, so nobody can guess a prompt and look for its hash.
"""

import errno
import fcntl
import json
import logging
import os
import threading
import time
from hashlib import blake2b
from pathlib import Path
from secrets import token_bytes
from typing import Any

from kvblocks import Sequence
from kvblocks.arguments import Given, check_count, check_number, check_text, counted, is_a, plain_text, shown, wrong
from kvblocks.errors import InvalidArgumentError

_ID_BYTES = 8  # among a million blocks, two have the same name with a chance of 1 in 37 million
_MAX_REMEMBERED = 250_000  # names, about 20 MB of them
_MAX_HEADER = 4096  # the most bytes that are read of a file's first line
_SAY_EVERY_S = 60.0
_SECONDS = "seconds, a number between -1e15 and 1e15"

_log = logging.getLogger(__name__)


class TraceRecorder:
    """Appends a line for each request to a file, from one process at a time.

    path: the file, which is made readable for its owner only. An existing trace with the same block size is continued,
    after cutting off an incomplete last line that a killed recorder may have left. block_size: the tokens of a block in
    the trace. key: 16 to 64 bytes; None: a random key. Recorders with equal keys give equal names, which several
    processes need if their traces belong together. Raises InvalidArgumentError for a file that can't be opened, that
    another recorder has open, or that contains anything else; such a file stays unchanged.

    A later failure to write (such as a full disk) raises nothing. The request is left out completely, counted in
    `num_lost`, and logged at most once a minute. So the file only has complete lines. Every line is passed to the
    system at once, so a killed process loses none. If somebody empties the file, to rotate it, it begins anew.
    Thread-safe.
    """

    def __init__(self, path: Path | str, block_size: int, *, key: bytes | None = None) -> None:
        self._block_size = check_count("block_size", block_size, 1)
        if key is not None and (not is_a(key, bytes) or not 16 <= len(key) <= 64):
            raise wrong("key", "None or 16 to 64 bytes", "something else")
        self._key = token_bytes(32) if key is None else key
        self._names: set[bytes] = set()  # of blocks that this recorder has written
        self._lock = threading.Lock()
        self._said_at = -_SAY_EVERY_S
        self._end = 0  # of the file, after the last write
        self.num_recorded = self.num_lost = 0
        try:
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._check_continued(path)
                _cut_torn_line(self._file)
                self._append(self._header())
            except (OSError, InvalidArgumentError):
                os.close(self._file)
                raise
        except OSError as error:
            raise InvalidArgumentError(
                f"path: expected a file that can be written, got {str(path)!r}: {error.strerror}"
            ) from error

    def record(
        self,
        sequence: Given[Sequence],
        *,
        arrived_s: float,
        seconds: float,
        stop: str = "",
        think_s: float | None = None,
    ) -> bool:
        """Record a request that has ended. Returns whether it was written. Does not change the sequence.

        The prompt is what the sequence was made with, and the answer is the tokens after it. Salt, LoRA and extra keys
        count as in the cache, and the salt is the tenant. arrived_s: when the request came, by `time.time`. seconds:
        roughly how long it held blocks. stop: why it ended, such as "tool_use" or "stop". think_s: how long its session
        paused before it, if known. Raises InvalidArgumentError. O(tokens).
        """
        if not isinstance(sequence, Sequence):
            raise wrong("record", "a Sequence", sequence)
        times = {"t": _seconds("arrived_s", arrived_s), "a": max(0.0, _seconds("seconds", seconds))}
        if not is_a(stop, str):
            raise wrong("stop", "a str", stop)
        why = check_text("stop", plain_text(stop))
        if think_s is not None:
            times["think"] = _seconds("think_s", think_s)
        with self._lock:
            if self._file is None:
                return False
            try:
                names = self._block_names(sequence)
                if os.fstat(self._file).st_size < self._end:
                    self._names.clear()
                    self._append(self._header())
                line = self._line(sequence, names) | times | {"stop": why}
                has_room = len(self._names) + len(names) <= _MAX_REMEMBERED
                self._append(line)
            except Exception as error:  # noqa: BLE001  # a failure here must never fail a request
                self._lose(error)
                return False
            if not has_room:
                self._names.clear()  # the next lines name their blocks anew
            self._names.update(names)
            self.num_recorded += 1
            return True

    def close(self) -> None:
        """Close the file. Later records are neither written nor counted. A second call does nothing."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _header(self) -> dict[str, Any]:
        return {"kvblocks_trace": 1, "block_size": self._block_size}

    def _check_continued(self, path: Path | str) -> None:
        """Raise InvalidArgumentError unless the file is new, or begins as ours would. Changes nothing."""
        assert self._file is not None, "it was just opened"
        begin = os.pread(self._file, _MAX_HEADER, 0)
        first, newline, _ = begin.partition(b"\n")
        try:
            is_own = self._header().items() <= json.loads(first).items()
        except (ValueError, AttributeError, RecursionError):
            is_own = False
        if not (is_own if newline else _packed(self._header()).startswith(begin)):
            raise InvalidArgumentError(
                f"path: expected a new file, or a trace with blocks of {self._block_size} tokens, got {str(path)!r}, "
                f"which begins with {shown(first)}"
            )

    def _line(self, sequence: Sequence, names: list[bytes]) -> dict[str, Any]:
        """Return a line's fields for a sequence: the names that no earlier line has, and the name before those."""
        start = len(names)
        while start and names[start - 1] not in self._names:
            start -= 1
        line: dict[str, Any] = {"tokens": sequence.num_prompt_tokens}
        line["output"] = sequence.num_tokens - sequence.num_prompt_tokens
        if start:
            line["after"] = names[start - 1].hex()
        line["ids"] = [name.hex() for name in names[start:]]
        for field, value in (("session", sequence.session), ("tenant", sequence.salt)):
            if value is not None:
                line[field] = self._hash(field.encode(), repr(value).encode("utf-8", "surrogatepass")).hex()
        return line

    def _block_names(self, sequence: Sequence) -> list[bytes]:
        """Return the name of each full block of the prompt. O(tokens)."""
        size = self._block_size
        tokens = sequence.packed_tokens()
        keys = sequence.encoded_keys(size) or {}
        names: list[bytes] = []
        name = b""
        for block in range(sequence.num_prompt_tokens // size):
            own = bytes(tokens[4 * size * block : 4 * size * (block + 1)])
            name = self._hash(name, own, keys.get(block, b""))
            names.append(name)
        return names

    def _hash(self, *parts: bytes) -> bytes:
        digest = blake2b(key=self._key, digest_size=_ID_BYTES)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()

    def _append(self, row: dict[str, Any]) -> None:
        """Write a whole line. If that fails, write nothing and raise OSError."""
        assert self._file is not None, "the caller has checked that it is open"
        line = _packed(row)
        size = os.fstat(self._file).st_size
        written = 0
        try:
            written = os.write(self._file, line)
        finally:
            if written < len(line):
                os.ftruncate(self._file, size)
        if written < len(line):
            raise OSError(errno.ENOSPC, f"expected room for {len(line)} bytes, got it for {written}")
        self._end = size + written

    def _lose(self, error: Exception) -> None:
        self.num_lost += 1
        now = time.monotonic()
        if now - self._said_at >= _SAY_EVERY_S:
            self._said_at = now
            lost = counted(self.num_lost, "request")
            _log.warning("%s could not be recorded, the last one since: %s", lost, error)


def _packed(row: dict[str, Any]) -> bytes:
    """Return a line's bytes."""
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _seconds(name: str, value: float) -> float:
    """Return seconds, rounded to milliseconds, that readers accept. Raises InvalidArgumentError."""
    number = check_number(name, value, _SECONDS)
    if not abs(number) < 1e15:
        raise wrong(name, _SECONDS, value)
    return round(float(number), 3)


def _cut_torn_line(file: int) -> None:
    """Cut off a torn last line. A process that dies in the middle of a write leaves one."""
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - 2**16)
        piece = os.pread(file, end - start, start)
        place = piece.rfind(b"\n")
        if place >= 0:
            end = start + place + 1
            break
        end = start
    os.ftruncate(file, end)
