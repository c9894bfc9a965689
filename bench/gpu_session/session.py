"""Runs items one after another, each in processes of its own, and ends in time whatever they do.

An illegal access leaves a CUDA process useless, and a kernel may hang. So no item shares a process with another one,
and each has a time limit. An item whose process dies, or hangs in a case, is started again after that case, as long as
there is time. What the processes print goes to `log.txt`.

If the session itself is killed, Linux also ends its processes, and `--resume` continues with what is left.
"""

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from bench.gpu_session.results import Line, Results, parse

ROOT = Path(__file__).resolve().parents[2]
POISONED = 77
"""The exit status of a process that ended itself because its CUDA context can't be used any more."""
CANNOT = 2
"""The exit status of a process that can't run here at all, for example without a GPU."""
PATH_VARIABLE, ITEM_VARIABLE = "KVBLOCKS_SESSION_RESULTS", "KVBLOCKS_SESSION_ITEM"
"""Environment variables that tell an item's processes where to write results, and the item's name."""
LOG_BYTES = 8 << 20
"""How many bytes of the log's end are kept."""
_POLL_S = 0.05
_SET_DEATH_SIGNAL = 1


@dataclass(frozen=True)
class Item:
    """Something to run. command: may contain "{out}" for the folder of results, and "{part}" for the process's number.

    limit_s: the time limit of the whole item; least_s: it isn't begun with less time left. case_limit_s: the time limit
    of one case. parts: how many processes run at a time, each with its share of the cases. is_needed: whether nothing
    else is worth running without it. is_repeated: whether every session runs all of it again. overwrites: the file in
    the folder of results that it begins anew; one of an earlier session is kept under another name.
    """

    name: str
    limit_s: float
    command: tuple[str, ...]
    least_s: float = 10.0
    case_limit_s: float = 60.0
    parts: int = 1
    is_needed: bool = False
    is_repeated: bool = False
    overwrites: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Part:
    """A process of an item. case: what it is at, since `since` on the monotonic clock."""

    number: int
    process: subprocess.Popen[bytes]
    since: float
    case: str | None = None


class Session:
    """A run of items. out: a folder; seconds: from now to the end of `run`; grace_s: to end an item's processes."""

    def __init__(self, out: Path, seconds: float, *, grace_s: float = 3.0) -> None:
        self._end = time.monotonic() + seconds
        self._grace_s = grace_s
        self._out = out
        self.results = Results(out / "results.jsonl")

    def run(self, items: Sequence[Item]) -> int:
        """Run what isn't done.

        Return the exit status: 0 if everything is right, CANNOT if a needed item can't run, else 1.
        """
        done = self.results.done_items()
        for item in items:
            if item.name in done and not item.is_repeated:
                continue
            left = self._end - 2 * self._grace_s - time.monotonic()
            if left < item.least_s:
                self._end_item(item, "skipped", why="no time")
                continue
            state = self._run_item(item, min(item.limit_s, left))
            if state == "cannot" and item.is_needed:
                return CANNOT
        wanted = {item.name for item in items}
        return 0 if wanted <= self.results.done_items() and not self.results.bad_cases() else 1

    def _run_item(self, item: Item, limit_s: float) -> str:
        start = time.monotonic()
        if item.is_repeated:
            self.results.begin_anew(item.name)
        if item.overwrites is not None:
            _set_aside(self._out / item.overwrites)
        with (self._out / "log.txt").open("ab", buffering=0) as log:
            log.write(f"\n=== {item.name}: {' '.join(item.command)}\n".encode())
            watch = _Watch(item, self.results, log, self._out, self._grace_s)
            try:
                state, statuses = watch.run(start + limit_s, is_cut=limit_s < item.limit_s)
            except OSError as error:  # no such program
                return self._end_item(item, "cannot", why=str(error))
        _cut(self._out / "log.txt")
        seconds = round(time.monotonic() - start, 1)
        return self._end_item(item, state, seconds=seconds, statuses=statuses)

    def _end_item(self, item: Item, state: str, **facts: object) -> str:
        self.results.append(item.name, state=state, **facts)
        told = ", ".join(f"{name} {value}" for name, value in facts.items())
        print(f"{item.name}: {state} ({told})", flush=True)
        return state


class _Watch:
    """Starts an item's processes, watches them, and starts those again that died in a case."""

    def __init__(self, item: Item, results: Results, log: IO[bytes], out: Path, grace_s: float) -> None:
        self._item = item
        self._results = results
        self._log = log
        self._out = out
        self._grace_s = grace_s
        self._read = results.path.stat().st_size if results.path.exists() else 0
        self._statuses: list[int] = []
        self._is_whole = True

    def run(self, end: float, *, is_cut: bool) -> tuple[str, list[int]]:
        """Return the item's state and its processes' exit statuses. is_cut: `end` is the session's, not the item's."""
        parts = [self._start(number) for number in range(self._item.parts)]
        while parts and time.monotonic() < end:
            self._note_cases(parts)
            parts = [next_part for part in parts if (next_part := self._look_at(part, end)) is not None]
            if parts:
                time.sleep(_POLL_S)
        for part in parts:
            self._kill(part)
        self._note_cases(parts)
        if parts:
            for part in parts:
                if not is_cut:  # else the next session begins the case again
                    self._give_up(part, "no end within the item's limit")
            return ("cut" if is_cut else "timeout"), self._statuses
        if CANNOT in self._statuses:
            return "cannot", self._statuses
        return ("done" if self._is_whole and not any(self._statuses) else "failed"), self._statuses

    def _start(self, number: int) -> _Part:
        item = self._item
        command = [word.replace("{out}", str(self._out)).replace("{part}", str(number)) for word in item.command]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        told = {PATH_VARIABLE: str(self._results.path), ITEM_VARIABLE: item.name}
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **item.environment, **told},
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509  # it calls one function of libc, and takes no lock
        )
        return _Part(number, process, time.monotonic())

    def _look_at(self, part: _Part, end: float) -> _Part | None:
        """Return the part, the one that replaces it, or None if it has ended."""
        status = part.process.poll()
        if status is None:
            if part.case is None or time.monotonic() - part.since < self._item.case_limit_s:
                return part
            self._kill(part)
            return self._again(part, f"no end within {self._item.case_limit_s:g} s", end)
        self._note_cases([part])
        _signal_group(part, signal.SIGKILL)  # what it has left behind
        # With a case open, 1 is no ordinary end: pytest-timeout ends its process with it.
        if status == POISONED or (part.case is not None and status not in (0, CANNOT)):
            return self._again(part, f"exit status {status}", end)
        self._statuses.append(status)
        return None

    def _again(self, part: _Part, why: str, end: float) -> _Part | None:
        """Start a part again behind the case that it was at."""
        self._is_whole = False
        self._give_up(part, why)
        return self._start(part.number) if time.monotonic() < end else None

    def _give_up(self, part: _Part, why: str) -> None:
        if part.case is not None:
            self._results.append(self._item.name, part.case, state="died", part=part.number, why=why)

    def _note_cases(self, parts: list[_Part]) -> None:
        """Read what the processes have written since the last time: which cases began and ended."""
        if not self._results.path.exists():
            return
        with self._results.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in parse(whole):
            for part in parts:
                _note(part, line, self._item.name)

    def _kill(self, part: _Part) -> None:
        """End a process and its children: first as Ctrl-C does, so that it may say where it was."""
        for number in (signal.SIGINT, signal.SIGKILL):
            _signal_group(part, number)
            with suppress(subprocess.TimeoutExpired):  # even SIGKILL waits for a driver that hangs
                part.process.wait(self._grace_s / 2)
                break
        _signal_group(part, signal.SIGKILL)
        self._statuses.append(-signal.SIGKILL if part.process.returncode is None else part.process.returncode)


def _note(part: _Part, line: Line, item: str) -> None:
    """Note a line about a case of this part."""
    if line["item"] != item or "case" not in line or line.get("part", 0) != part.number:
        return
    if line.get("state") == "began":
        part.case, part.since = line["case"], time.monotonic()
    elif line["case"] == part.case:
        part.case = None


def _signal_group(part: _Part, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(part.process.pid, number)


def _die_with_parent() -> None:
    """Ask Linux to end this process when the session ends, however that happens."""
    if sys.platform == "linux":
        _LIBC.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


_LIBC = ctypes.CDLL(None)


def _set_aside(path: Path) -> None:
    """Rename a file, if it exists: engine.json becomes engine-1.json, or the first number that is free."""
    if path.exists():
        names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))


def _cut(log: Path) -> None:
    """Keep the end of the log alone, if an item has printed more than anybody reads."""
    with log.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size > LOG_BYTES:
            file.seek(size - LOG_BYTES)
            kept = file.read()
            file.seek(0)
            file.write(b"(the beginning was cut off)\n" + kept)
            file.truncate()
