"""`results.jsonl`: a line for each case, on the disk before the next case begins.

A line of a case has `item`, `case`, `at` (seconds since 1970) and `state`: "began", then "done", "wrong", "failed" or
"died". A line without a case is about the item itself. Anything else in the file is ignored, such as half a line of a
killed process, or what a broken process wrote.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]
ANEW = "anew"
"""The state of an item that every session runs again, such as `facts`, when it is about to."""
ATTEMPTS = 2
"""A case that began this often and never ended isn't begun again, since it may be what kills the machine."""


@dataclass(frozen=True)
class Results:
    """The lines of a session, in a file that several processes append to."""

    path: Path

    def append(self, item: str, case: str | None = None, **facts: object) -> None:
        """Write a line, and wait until the disk has it."""
        line: Line = {"item": item} if case is None else {"item": item, "case": case}
        text = json.dumps(line | {"at": round(time.time(), 1)} | facts, default=str) + "\n"
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            # One write, so that lines of several processes don't mix.
            os.write(descriptor, b"\n" * is_torn + text.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def begin_anew(self, item: str) -> None:
        """Forget which cases of an item have finished. Lines after this one are about the machine of this session."""
        self.append(item, state=ANEW)

    def lines(self) -> list[Line]:
        """All lines so far."""
        return list(parse(self.path.read_bytes())) if self.path.exists() else []

    def finished(self, item: str) -> set[str]:
        """The cases of an item that must not be begun again."""
        began: Counter[str] = Counter()
        ended: set[str] = set()
        for line in self.lines():
            if line["item"] != item:
                continue
            if "case" not in line:
                if line.get("state") == ANEW:
                    began.clear()
                    ended.clear()
            elif line.get("state") == "began":
                began[line["case"]] += 1
            else:
                ended.add(line["case"])
        return ended | {case for case, number in began.items() if number >= ATTEMPTS}

    def bad_cases(self) -> list[Line]:
        """The lines of cases with no result or a wrong one."""
        return [line for line in self.lines() if "case" in line and line.get("state") in ("wrong", "failed", "died")]

    def done_items(self) -> set[str]:
        """The items with nothing left to do."""
        done: set[str] = set()
        for line in self.lines():
            if "case" not in line and line.get("state") == "done":
                done.add(line["item"])
            elif "case" not in line and line.get("state") == ANEW:
                done.discard(line["item"])
        return done


def parse(data: bytes) -> Iterator[Line]:
    """Yield the complete lines that `Results.append` wrote."""
    for text in data.splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("item"), str) and isinstance(line.get("case", ""), str):
            yield line
