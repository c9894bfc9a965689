"""Readers of traces: Mooncake's format, the session format of agents' traces, and ours, which `recorder` writes.

All three are JSON lines, and a file name may end in .gz. The format is recognized from the file's first line.

Mooncake's: `{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}`: milliseconds, tokens of
the prompt and of the answer, and one id for each 512 tokens of the prompt. The last id may stand for a partial block,
which is left out. The format has no sessions, and doesn't say how long a request ran.

Agents' sessions: a line `{"session": "trace_0001", "block_size": 64}` opens a session, and block ids are valid within
their session only. Then comes a line for each request. Other fields than these are ignored.

- t: when the request came, in seconds from the session's beginning.
- a: seconds that it took, or null.
- k: think time before it in seconds, or null.
- s: why it ended: "tool_use", "end_turn", or "".
- in, out: the numbers of tokens of the prompt and of the answer.
- p: its prompt begins with the first p block ids of the request before it.
- h: the block ids after those, as a list of ranges [start, count].

Ours: the first line is `{"kvblocks_trace": 1, "block_size": 16}`, which is repeated where a file was continued. Then
comes a line for each request. If the last line is cut off in the middle, it is skipped with a warning.

- t: when it came, in seconds since any fixed moment. Lines need not be in order.
- a: seconds that it ran. Left out: unknown.
- think: seconds that its session paused before it. Left out: computed from t and a.
- session, tenant: strings. No session: the request is a session by itself. No tenant: all such requests share one.
- tokens, output: the numbers of tokens of the prompt and of the answer (0 if left out).
- stop: why it ended; a policy like `sessions` learns what each reason means.
- after: the id of a block in an earlier line: the prompt begins with all blocks up to this one. Left out: it begins
  with `ids`.
- ids: the ids of the blocks that follow, as strings; each stands for one prefix. Full blocks only.
"""

import gzip
import json
import logging
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import numpy as np

from kvblocks.arguments import shown
from kvblocks.errors import InvalidArgumentError
from kvblocks.replay.trace import Numbers, Trace, TraceError, ends_of, number_densely

MOONCAKE_BLOCK_SIZE = 512
MAX_BLOCKS = 2**24
"""The most blocks of one prompt: far more than any real prompt has, but few enough for memory."""
MAX_COUNT = 2**40
"""The most tokens of a prompt, and similar counts: far above any real one, and sums still fit into 64 bits."""
VERSION = 1
"""Version of our own format: the value of `kvblocks_trace` in its first line."""

_SURROGATE = re.compile("[\ud800-\udfff]")  # neither files nor managers take these

_log = logging.getLogger(__name__)
_NONE: Any = object()


class TraceLine:
    """A line of a trace. Its methods return a field's value or raise TraceError."""

    def __init__(self, where: str, row: dict[str, Any]) -> None:
        self.where = where
        self.row = row

    def wrong(self, field: str, expected: str, got: object = _NONE) -> TraceError:
        """Return the error for a field. got: by default, the field's value."""
        if got is _NONE:
            got = self.row.get(field, _NONE)
        return TraceError(
            f"{self.where}, field {field!r}: expected {expected}, got {'none' if got is _NONE else shown(got)}"
        )

    def count(self, field: str, low: int = 0, default: int | None = None) -> int:
        """Return an int of at least `low`, and at most MAX_COUNT."""
        value = self.row.get(field, default)
        if type(value) is not int or value < low:
            raise self.wrong(field, f"an integer of at least {low}")
        if value > MAX_COUNT:
            raise self.wrong(field, "an integer of at most 2**40")
        return value

    def seconds(self, field: str) -> float:
        """Return a number; NaN for null, or if the field is missing."""
        value = self.row.get(field)
        if value is None:
            return float("nan")
        if type(value) not in (int, float) or not abs(value) < 1e15:
            raise self.wrong(field, "a number")
        return float(value)

    def duration(self, field: str) -> float:
        """Return a number of at least 0; NaN for null, or if the field is missing."""
        value = self.seconds(field)
        if value < 0:
            raise self.wrong(field, "a number of at least 0")
        return value

    def time(self, field: str) -> float:
        """Return a number. The field must be there."""
        if self.row.get(field) is None:
            raise self.wrong(field, "a number")
        return self.seconds(field)

    def text(self, field: str, default: str | None = None) -> str:
        """Return a string."""
        value = self.row.get(field, default)
        if type(value) is not str:
            raise self.wrong(field, "a string")
        if _SURROGATE.search(value):
            raise self.wrong(field, "a string without lone surrogates")
        return value

    def items(self, field: str) -> list[Any]:
        """Return a list."""
        value = self.row.get(field)
        if type(value) is not list:
            raise self.wrong(field, "a list")
        return value


class _Columns:
    """The data that a reader collects. Sessions are known by their names."""

    def __init__(self, name: str, source_format: str, block_size: int) -> None:
        self.name, self.source_format, self.block_size = name, source_format, block_size
        self.prompts: list[Numbers] = []
        self.sessions, self.tokens, self.outputs = array("q"), array("q"), array("q")
        self.times, self.durations, self.thinks = array("d"), array("d"), array("d")
        self.stops: list[str] = []
        self.numbers: dict[tuple[str | None, str | int], int] = {}

    def add(self, prompt: Numbers, session: tuple[str | None, str | int], times: tuple[float, float, float]) -> None:
        """Add a request. session: its tenant, and its name, or a number if it has none.

        times: when it came, how long it ran, and the think time before it.
        """
        self.prompts.append(prompt)
        self.sessions.append(self.numbers.setdefault(session, len(self.numbers)))
        for column, value in zip((self.times, self.durations, self.thinks), times, strict=True):
            column.append(value)

    def note(self, stop: str, num_tokens: int, num_output_tokens: int) -> None:
        """Add the remaining fields of the last added request."""
        self.stops.append(stop)
        self.tokens.append(num_tokens)
        self.outputs.append(num_output_tokens)

    def trace(self, *, times_are_relative: bool) -> Trace:
        """Return the trace, by time; by time within each session if times are relative to its beginning."""
        if not self.prompts:
            raise TraceError(f"{self.name}: expected requests, got none")
        times, sessions = np.array(self.times), np.array(self.sessions)
        if not times_are_relative:
            times -= times.min()
        order = np.lexsort((times, sessions)) if times_are_relative else np.argsort(times, kind="stable")
        if not times_are_relative:  # sessions are numbered in the order in which they begin
            _, firsts = np.unique(sessions[order], return_index=True)
            rank = np.empty(len(firsts), np.int64)
            rank[np.argsort(firsts)] = np.arange(len(firsts))
            sessions = rank[sessions]
            by_rank = np.argsort(rank)
        else:
            by_rank = np.arange(len(self.numbers))
        keys = [*self.numbers]
        return Trace(
            name=self.name,
            source_format=self.source_format,
            block_size=self.block_size,
            blocks=number_densely(np.concatenate([self.prompts[request] for request in order])),
            ends=ends_of(np.array([len(self.prompts[request]) for request in order])),
            sessions=sessions[order],
            times=times[order],
            durations=np.array(self.durations)[order],
            thinks=np.array(self.thinks)[order],
            tokens=np.array(self.tokens)[order],
            outputs=np.array(self.outputs)[order],
            stops=[self.stops[request] for request in order],
            session_names=[
                None if type(name) is int else str(name) for _, name in (keys[session] for session in by_rank)
            ],
            tenants=[keys[session][0] for session in by_rank],
            times_are_relative=times_are_relative,
        )


class _Tree:
    """Every block's parent. So a trace in which equal ids don't mean equal prefixes is refused."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}

    def check(self, line: TraceLine, field: str, path: list[int], start: int) -> None:
        """Record path[start:], ids of consecutive blocks. Raises TraceError if one had another parent before."""
        parents = self.parents
        before = path[start - 1] if start else -1
        for block in path[start:]:
            if parents.setdefault(block, before) != before:
                expected = f"ids that stand for one prefix each; {block} had another id before it than now"
                raise line.wrong(field, expected, before)
            before = block


def read_trace(path: Path, block_size: int | None = None) -> Trace:
    """Read the trace in a file. Raises TraceError, and OSError if the file can't be read.

    block_size: a multiple of the file's own block size, or None for that one. The blocks of a prompt are joined to
    blocks of this many tokens; a rest at the end belongs to no block. O(references).
    """
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{path.name}: expected requests, got an empty file")
    for field, reader in _READERS.items():
        if field in first.row:
            return reader(path.name, first, lines, block_size)
    fields = ", ".join(map(repr, _READERS))
    raise TraceError(f"{first.where}: expected one of the fields {fields}, got {shown([*first.row])}")


def _lines(path: Path) -> Iterator[TraceLine]:
    """Yield the file's lines. A last line that is cut, as by a killed recorder, is left out, and logged."""
    number = 0
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, 1):
                if not raw.strip():
                    continue
                where = f"{path.name}, line {number}"
                try:
                    row = json.loads(raw)
                except (ValueError, RecursionError) as error:
                    if not raw.endswith(b"\n"):
                        _log.warning("%s: left out, since it was cut after %d bytes", where, len(raw))
                        return
                    raise TraceError(f"{where}: expected JSON, got {shown(raw)}: {error}") from None
                if type(row) is not dict:
                    raise TraceError(f"{where}: expected an object, got {shown(row)}")
                yield TraceLine(where, row)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path.name}, after line {number}: expected a whole gzip file, got {error}") from error


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _factor(where: str, own: int, wanted: int | None) -> int:
    """Return how many of the file's blocks make one of the wanted size."""
    if wanted is None:
        return 1
    if wanted < own or wanted % own:
        raise InvalidArgumentError(
            f"{where}: expected a block size that is a multiple of its {own} tokens, got {wanted}"
        )
    return wanted // own


def _thin(path: Any, factor: int) -> Numbers:
    """Return every `factor`-th id. A block's id stands for all before it, so it also names the larger block."""
    return np.array(path[factor - 1 :: factor], np.int64)


def _read_mooncake(name: str, first: TraceLine, rest: Iterator[TraceLine], block_size: int | None) -> Trace:
    factor = _factor(name, MOONCAKE_BLOCK_SIZE, block_size)
    columns = _Columns(name, "mooncake", MOONCAKE_BLOCK_SIZE * factor)
    tree = _Tree()
    for number, line in enumerate(_all(first, rest)):
        path = _int_ids(line, "hash_ids")
        num_tokens = line.count("input_length")
        num_full = num_tokens // MOONCAKE_BLOCK_SIZE
        if not num_full <= len(path) <= num_full + 1:
            raise line.wrong("hash_ids", f"{num_full} ids for input_length {num_tokens}, or one more", len(path))
        tree.check(line, "hash_ids", path, 0)
        time = line.time("timestamp") / 1000
        columns.add(_thin(path[:num_full], factor), (None, number), (time, float("nan"), float("nan")))
        columns.note("", num_tokens, line.count("output_length"))
    return columns.trace(times_are_relative=False)


def _all(first: TraceLine, rest: Iterator[TraceLine]) -> Iterator[TraceLine]:
    yield first
    yield from rest


def _int_ids(line: TraceLine, field: str) -> list[int]:
    ids = line.items(field)
    for block in ids:
        if type(block) is not int or not 0 <= block < 2**48:
            raise line.wrong(field, "ids from 0 to 2**48 - 1", block)
    return ids


def _read_sessions(name: str, first: TraceLine, rest: Iterator[TraceLine], block_size: int | None) -> Trace:
    columns: _Columns | None = None
    own = factor = base = top = 0
    session = ""
    tree = _Tree()
    path: Numbers = np.empty(0, np.int64)
    for line in _all(first, rest):
        if "session" in line.row:
            session, size = line.text("session"), line.count("block_size", 1)
            if columns is None:
                own, factor = size, _factor(name, size, block_size)
                columns = _Columns(name, "sessions", own * factor)
            if size != own:
                raise line.wrong("block_size", f"{own}, as in the sessions before")
            if (None, session) in columns.numbers:
                raise line.wrong("session", "a name that no session before has")
            base, top, tree, path = base + top, 0, _Tree(), path[:0]
            continue
        assert columns is not None, "the first line opens a session"
        num_shared = line.count("p")
        if num_shared > len(path):
            raise line.wrong("p", f"at most the {len(path)} ids of the request before it")
        ranges = _ranges(line, MAX_BLOCKS - num_shared)
        path = np.concatenate([path[:num_shared], *(np.arange(start, start + count) for start, count in ranges)])
        end = int(path[num_shared:].max(initial=-1)) + 1
        top = max(top, end)
        tree.check(line, "h", path[max(0, num_shared - 1) :].tolist(), min(1, num_shared))
        times = line.time("t"), line.duration("a"), line.seconds("k")
        columns.add(_thin(path, factor) + base, (None, session), times)
        columns.note(line.text("s", ""), line.count("in"), line.count("out"))
    if columns is None:
        _no_columns(first)
    return columns.trace(times_are_relative=True)


def _ranges(line: TraceLine, most: int) -> list[tuple[int, int]]:
    """Return the ranges in a line. most: how many ids they may have in all."""
    found: list[tuple[int, int]] = []
    for pair in line.items("h"):
        if type(pair) is not list or [type(part) for part in pair] != [int, int] or min(pair) < 0 or sum(pair) > 2**32:
            raise line.wrong("h", "ranges [start, count] of ids below 2**32", pair)
        most -= pair[1]
        if most < 0:
            raise line.wrong("h", f"a prompt of at most {MAX_BLOCKS} ids", pair)
        found.append((pair[0], pair[1]))
    return found


def _no_columns(first: TraceLine) -> NoReturn:
    raise TraceError(f"{first.where}: expected a line that opens a session, got {shown(first.row)}")


def _read_ours(name: str, first: TraceLine, rest: Iterator[TraceLine], block_size: int | None) -> Trace:
    version = first.count("kvblocks_trace", 1)
    if version != VERSION:
        raise first.wrong("kvblocks_trace", f"version {VERSION}")
    own = first.count("block_size", 1)
    factor = _factor(name, own, block_size)
    columns = _Columns(name, "kvblocks", own * factor)
    numbers: dict[str, int] = {}
    parents: list[int] = []  # by number; -1: none
    for count, line in enumerate(rest):
        if "kvblocks_trace" in line.row:  # another recorder, with its own key, continued the file
            if line.count("block_size", 1) != own:
                raise line.wrong("block_size", f"{own}, as in the first line")
            continue
        path = _path(line, numbers, parents)
        num_tokens = line.count("tokens")
        if len(path) > num_tokens // own:
            raise line.wrong("ids", f"at most {num_tokens // own} blocks of {own} tokens in all", len(path))
        tenant = line.row.get("tenant")
        if tenant is not None:
            tenant = line.text("tenant")
        session = count if line.row.get("session") is None else line.text("session")
        columns.add(_thin(path, factor), (tenant, session), (line.time("t"), line.duration("a"), line.seconds("think")))
        columns.note(line.text("stop", ""), num_tokens, line.count("output", default=0))
    return columns.trace(times_are_relative=False)


def _path(line: TraceLine, numbers: dict[str, int], parents: list[int]) -> list[int]:
    """Return the blocks of a line in our format: those up to `after`, then `ids`."""
    path: list[int] = []
    after = line.row.get("after")
    if after is not None:
        block = numbers.get(line.text("after"), -1)
        if block < 0:
            raise line.wrong("after", "an id of a line before")
        while block >= 0:
            path.append(block)
            block = parents[block]
        path.reverse()
    for name in line.items("ids"):
        if type(name) is not str or not name:
            raise line.wrong("ids", "strings", name)
        before = path[-1] if path else -1
        block = numbers.setdefault(name, len(numbers))
        if block == len(parents):
            parents.append(before)
        elif parents[block] != before:
            expected = "ids that stand for one prefix each; this one had another id before it than now"
            raise line.wrong("ids", expected, name)
        path.append(block)
    return path


_READERS: dict[str, Callable[[str, TraceLine, Iterator[TraceLine], int | None], Trace]] = {
    "kvblocks_trace": _read_ours,
    "session": _read_sessions,
    "hash_ids": _read_mooncake,
}
