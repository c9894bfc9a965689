"""Runs cases against a server until the time is up, and repeats what they find."""

import itertools
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvblocks.errors import InvalidArgumentError
from kvblocks.verify.server.cases import CASES
from kvblocks.verify.server.finding import Finding
from kvblocks.verify.server.patient import Patient, repeated
from kvblocks.verify.server.target import AnswerError, TimeUpError

_TRIES = 3


@dataclass(frozen=True)
class CheckupOptions:
    """The options of a checkup. It ends with its target's time, or when `max_requests` are used up.

    seed: equal seeds draw equal words. only: the case to run; None: all cases in turns.
    """

    max_requests: int = 5000
    seed: str = "1"
    only: str | None = None

    def __post_init__(self) -> None:
        if self.max_requests < 1:
            raise InvalidArgumentError(f"max_requests: expected at least 1, got {self.max_requests}")
        if self.only is not None and self.only not in CASES:
            raise InvalidArgumentError(f"only: expected one of {', '.join(CASES)}, got {self.only!r}")


@dataclass
class Checkup:
    """What a checkup found. num_tries: how often each case ran. not_tried: cases that don't apply to this server."""

    patient: Patient
    options: CheckupOptions
    findings: list[Finding] = field(default_factory=list)
    num_tries: dict[str, int] = field(default_factory=dict)
    not_tried: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, note: Callable[[str], None] = lambda _: None) -> None:
        """Run all cases in turns, until the time or the requests are used up. note: called with progress messages.

        A case that found something isn't run again. An answer that can't be read is a finding, too. Raises TimeUpError
        if no case was complete in time, and TargetError if the server can't be reached any more.
        """
        self._run(None, note)

    def run_turns(self, number: int) -> None:
        """Run each case `number` times, while there are time and requests left. Otherwise as `run`."""
        self._run(number, lambda _: None)

    def _run(self, num_turns: int | None, note: Callable[[str], None]) -> None:
        start_s = time.monotonic()
        with suppress(TimeUpError):
            self._run_cases(num_turns, note)
        end_s = time.monotonic()
        self.seconds += end_s - start_s
        if not self.num_tries and end_s >= self.patient.target.end_s:
            raise TimeUpError(f"{self.patient.target.url}: expected a complete case in the time given, got none")

    def _run_cases(self, num_turns: int | None, note: Callable[[str], None]) -> None:
        names = list(CASES) if self.options.only is None else [self.options.only]
        self.not_tried = [name for name in names if not CASES[name].applies_to(self.patient)]
        names = [name for name in names if name not in self.not_tried]
        for turn in itertools.count():
            if not names or turn == num_turns:
                return
            seed = self.options.seed if turn == 0 else f"{self.options.seed}.{turn}"
            for name in list(names):
                if self._is_over():
                    return
                note(f"{name}, seed {seed}")
                found = self._try(name, seed)
                self.num_tries[name] = self.num_tries.get(name, 0) + 1
                if found is not None:
                    note(f"{name} found something")
                    self.findings.append(self._repeat(name, seed, found))
                    names.remove(name)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        patient, target = self.patient, self.patient.target
        return {
            "url": target.url,
            "model": target.model,
            "seed": self.options.seed,
            "seconds": round(self.seconds, 1),
            "num_requests": target.num_requests,
            "cold_by": patient.coldness.by,
            "tolerance_nats": _finite(patient.tolerance.nats),
            "noise_nats": _finite(patient.tolerance.noise),
            "notes": patient.notes,
            "measured": patient.measured,
            "num_tries": self.num_tries,
            "not_tried": self.not_tried,
            "findings": [
                {
                    "case": finding.case,
                    "shows": CASES[finding.case].shows,
                    "what": finding.what,
                    "expected": finding.expected,
                    "got": finding.got,
                    "times_tolerance": _finite(finding.difference),
                    "num_seen": finding.num_seen,
                    "num_tries": finding.num_tries,
                    "repeat": finding.repeat,
                    "prompts": finding.prompts,
                }
                for finding in self.findings
            ],
        }

    def _is_over(self) -> bool:
        target = self.patient.target
        return time.monotonic() >= target.end_s or target.num_requests >= self.options.max_requests

    def _try(self, name: str, seed: str) -> Finding | None:
        try:
            return CASES[name].find(self.patient, seed)
        except AnswerError as error:
            return Finding(name, "an answer can't be read", "an answer in OpenAI's form", str(error))

    def _repeat(self, name: str, seed: str, finding: Finding) -> Finding:
        """Try a case that found something twice more, with the same words, if there is time."""
        num_seen = num_tries = 1
        with suppress(TimeUpError):
            while num_tries < _TRIES:
                is_seen = self._try(name, seed) is not None
                num_seen, num_tries = num_seen + is_seen, num_tries + 1
        command = f"kvblocks verify {self.patient.target.url} --only {name} --seed {seed}"
        return repeated(finding, num_seen, num_tries, command)


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
