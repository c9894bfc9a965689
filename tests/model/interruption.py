"""Exceptions at every opcode of a call: what `test_interruption.py` does to managers and caches, and how it judges.

The plain build's own frames are traced by opcode, and a KeyboardInterrupt is raised at the n-th of them. A `Case` makes
the same object and the same call each time, so that n can go from 1 until the call ends undisturbed.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import kvblocks

PACKAGE = str(Path(kvblocks.__file__).parent)


@dataclass
class Case:
    """One call of one object.

    look: returns its whole state, as plain values. check: raises unless it is consistent. calls: all that a broken
    object must refuse, by name. salvage: raises unless what a broken object leaves can be used elsewhere.
    """

    call: Callable[[], Any]
    look: Callable[[], Any]
    check: Callable[[], None]
    calls: dict[str, Callable[[], Any]]
    salvage: Callable[[], None]


def interrupt(call: Callable[[], Any], at: int) -> int:
    """Run `call` with a KeyboardInterrupt at the opcode number `at`, counted from 1. Returns how many there were.

    If there were fewer than `at`, the call ended undisturbed.
    """
    num_seen = 0

    def watch(_frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal num_seen
        if event == "opcode":
            num_seen += 1
            if num_seen == at:
                raise KeyboardInterrupt
        return watch

    def enter(frame: FrameType, _event: str, _arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return watch

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        with suppress(KeyboardInterrupt):
            run(call)
    finally:
        sys.settrace(before)
    return num_seen


def run(call: Callable[[], Any]) -> None:
    """Run a call, which may raise one of our errors."""
    with suppress(kvblocks.KVBlocksError):
        call()


def accepted(calls: dict[str, Callable[[], Any]], error: type[Exception]) -> list[str]:
    """Return the names of the calls that don't raise `error`."""
    names = []
    for name, call in calls.items():
        try:
            call()
        except error:
            continue
        except Exception as other:  # noqa: BLE001  # told by name
            names.append(f"{name} ({other!r})")
        else:
            names.append(name)
    return names


def judge(case: Case, before: Any, after: Any, error: type[Exception]) -> str:
    """Say what an interrupted object is: "refuses", "before", "after", or else what is wrong with it."""
    try:
        case.check()
        found = case.look()
    except error:
        answers = accepted(case.calls, error)
        if answers:
            return f"refuses some calls, and accepts {', '.join(answers)}"
        case.salvage()
        return "refuses"
    except Exception as wrong:  # noqa: BLE001  # whatever a corrupt object raises
        return f"accepted, and {wrong!r}"
    if found == after:
        return "after"
    if found != before:
        return f"accepted, and neither as before nor as after: {different(found, before)} / {different(found, after)}"
    run(case.call)
    if case.look() != after:
        return f"accepted, and the same call then does something else: {different(case.look(), after)}"
    return "before"


def different(found: Any, expected: Any) -> str:
    """Say where two states differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = [key for key in {**found, **expected} if found.get(key) != expected.get(key)]
        return ", ".join(f"{key}: {_short(found.get(key))}, not {_short(expected.get(key))}" for key in keys)
    return f"{_short(found)}, not {_short(expected)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 400 else f"{text[:200]} … {text[-200:]}"


def interrupt_everywhere(
    make: Callable[[], Case], error: type[Exception], first: int = 1, stride: int = 1
) -> dict[str, list[int]]:
    """Interrupt a case at each `stride`-th opcode from `first` on, and at its last one.

    Returns the verdicts, and where they fell.
    """
    case = make()
    before = case.look()
    run(case.call)
    case.check()
    after = case.look()
    verdicts: dict[str, list[int]] = {}
    at, is_last = first, False
    while not is_last:
        case = make()
        num_opcodes = interrupt(case.call, at)
        is_last = num_opcodes < at
        if is_last:
            case, at = make(), num_opcodes
            interrupt(case.call, at)
        verdicts.setdefault(judge(case, before, after, error), []).append(at)
        at += stride
    return verdicts
