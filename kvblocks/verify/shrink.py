"""Shortens a list of calls that shows a fault, as long as it still shows a fault of the same kind."""

from collections.abc import Callable
from dataclasses import replace
from string import ascii_lowercase

from kvblocks.verify.calls import Call, Free, Grow, Start

Shows = Callable[[list[Call]], bool]


def shrink(calls: list[Call], shows: Shows, max_tries: int = 3000) -> list[Call]:
    """Return a short list of calls for which `shows` is true, as it is for `calls`. Tries at most `max_tries` lists.

    First it leaves out calls, at the beginning half of them at once (Zeller's ddmin), and then it shortens prompts.
    """
    tries = _Tries(shows, max_tries)
    before: list[Call] = []
    while before != calls:
        before = calls
        calls = _shorten(_leave_out(calls, tries), tries)
    return calls


def rename(calls: list[Call]) -> list[Call]:
    """Return the same calls with requests renamed a, b, … in order, with numbers after z."""
    names = dict.fromkeys(call.name for call in calls if isinstance(call, Start | Grow | Free))
    short = {name: ascii_lowercase[number] if number < 26 else str(number) for number, name in enumerate(names)}
    return [replace(call, name=short[call.name]) if isinstance(call, Start | Grow | Free) else call for call in calls]


class _Tries:
    """Asks whether calls show the fault, a bounded number of times; then nothing does."""

    def __init__(self, shows: Shows, left: int) -> None:
        self._shows, self._left = shows, left

    def __call__(self, calls: list[Call]) -> bool:
        self._left -= 1
        return self._left >= 0 and self._shows(calls)


def _leave_out(calls: list[Call], tries: _Tries) -> list[Call]:
    size = max(1, len(calls) // 2)
    while True:
        start = 0
        while start < len(calls):
            fewer = calls[:start] + calls[start + size :]
            if tries(fewer):
                calls = fewer
            else:
                start += size
        if size == 1:
            return calls
        size //= 2


def _shorten(calls: list[Call], tries: _Tries) -> list[Call]:
    for index in range(len(calls)):
        found = True
        while found:
            found = False
            for simpler in _simpler(calls[index]):
                shorter = [*calls[:index], simpler, *calls[index + 1 :]]
                if tries(shorter):
                    calls, found = shorter, True
                    break
    return calls


def _simpler(call: Call) -> list[Call]:
    """Calls that say less."""
    match call:
        case Start(tokens=tokens, salt=salt, num_new_tokens=num_tokens):
            found: list[Call] = []
            if len(tokens) > 1:
                found += [replace(call, tokens=tokens[: len(tokens) // 2]), replace(call, tokens=tokens[:-1])]
            if salt is not None:
                found.append(replace(call, salt=None))
            if num_tokens < len(tokens):
                found.append(replace(call, num_new_tokens=len(tokens)))
            if any(tokens):
                found.append(replace(call, tokens=(0,) * len(tokens)))
            return found
        case Grow(tokens=tokens) if len(tokens) > 1:
            return [replace(call, tokens=tokens[:-1], num_tokens=len(tokens) - 1)]
        case _:
            return []
