"""The results of a sweep in a file of JSON lines. Each is on the disk at once, and the next run finds it.

Before a candidate runs, a line says so. A candidate that killed its process has only this line: it is out, and the next
run continues after it.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvblocks.kernels.table import Key, Launch

Times = tuple[float, ...] | None
"""Microseconds for each shape, or None if the candidate is out."""


class SweepResults:
    """The results in a file, or only in memory without one. gpu: this one's name; results of others don't count."""

    def __init__(self, path: Path | None, gpu: str = "") -> None:
        self._path = path
        self._gpu = gpu
        self._found: dict[str, Times] = {}
        if path is not None and path.exists():
            text = path.read_bytes()
            # A line that was being written when the process was killed has no end. It is completed, and means nothing.
            if text and not text.endswith(b"\n"):
                self._append("\n")
            for line in text.splitlines():
                self._note(line)

    def knows(self, kernel: str, key: Key, launch: Launch) -> bool:
        """Whether `measured` has the times of a candidate, or knows that it is out."""
        return json.dumps(self._describe(kernel, key, launch)) in self._found

    def measured(self, kernel: str, key: Key, launch: Launch, measure: Callable[[], Times]) -> Times:
        """A candidate's times: those in the file, or else what `measure` gives, which is written."""
        what = self._describe(kernel, key, launch)
        name = json.dumps(what)
        if name not in self._found:
            self._append(json.dumps(what | {"state": "began"}) + "\n")
            self._found[name] = measure()
            self._append(json.dumps(what | {"microseconds": self._found[name]}) + "\n")
        return self._found[name]

    def _note(self, line: bytes) -> None:
        try:
            found: dict[str, Any] = json.loads(line)
            name = json.dumps({field: found[field] for field in ("gpu", "kernel", "key", "launch")})
        except (ValueError, KeyError, TypeError):
            return
        times = found.get("microseconds")
        self._found[name] = None if times is None else tuple(times)

    def _append(self, text: str) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())

    def _describe(self, kernel: str, key: Key, launch: Launch) -> dict[str, Any]:
        return {"gpu": self._gpu, "kernel": kernel, "key": list(key), "launch": asdict(launch)}
