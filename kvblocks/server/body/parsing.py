"""Parses JSON whose cost is bounded before it is parsed.

Python's parser holds the interpreter's lock until it is done. How long that takes depends on the text: 4 MiB of names
or of numbers with a fraction take 0.2 s, of whole numbers 0.1 s, and one string 0.003 s.
"""

import json
import math
import re
from itertools import chain, islice
from typing import Any, NoReturn

from kvblocks.server.errors import ApiError

MAX_ITEMS = 10_000
"""The most messages of a chat, parts of a message, prompts of a body, template values, or numbers with a fraction.

Checking each of them takes microseconds.
"""

MAX_DEPTH = 64
"""How deeply values for a template may be nested, since they are checked by recursion."""

MAX_NESTS = 2**17
"""The most names, arrays and objects of a text. Parsing them takes about 0.07 s."""

MAX_VALUES = 2**20
"""The most commas of a text, and so the most token ids. Parsing them takes about 0.05 s."""

SMALL_TEXT = 2**14
"""A text up to this many characters is parsed and checked within a few milliseconds, whatever it contains."""

_BOUNDS = ((":[{", MAX_NESTS, "names, arrays and objects"), (",", MAX_VALUES, "values"))
_FEW_QUOTES = 2**17  # some 0.01 s
# A string, or what is left of one that doesn't end. Each of its characters is looked at once.
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises ApiError; a text that would take too long is refused before it is parsed.
    """
    for marks, most, what in _BOUNDS:
        if sum(map(text.count, marks)) > most and _exceeds(text, marks, most):
            raise ApiError(400, f"expected a JSON body with at most {most} {what}, got more", code="too_many_values")
    try:
        return json.loads(text, parse_float=_Fractions(), parse_constant=_refuse)
    except RecursionError:
        raise ApiError(400, "expected a JSON body, got one that is nested too deep") from None
    except ValueError as error:
        raise ApiError(400, f"expected a JSON body, got an error: {ascii(str(error))[1:-1]:.200}") from None


def decode_json(body: bytes) -> Any:
    """Return the value of a JSON body in UTF-8. Raises ApiError as `parse_json` does."""
    try:
        text = body.decode("utf-8-sig", "surrogatepass")
    except ValueError as error:
        raise ApiError(400, f"expected a JSON body, got an error: {ascii(str(error))[1:-1]:.200}") from None
    return parse_json(text)


def is_small(value: Any, slack: int = 0) -> bool:
    """Whether a JSON value has at most MAX_ITEMS values, itself included, nested at most MAX_DEPTH deep.

    slack: how many more values and levels it may have, for what is around a value that may have so many. O(MAX_ITEMS).
    """
    number, level = 0, [value]
    for _ in range(MAX_DEPTH + slack):
        number += len(level)
        if not level or number > MAX_ITEMS + slack:
            break
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = list(islice(chain.from_iterable(inner), MAX_ITEMS + slack + 1))
    return not level and number <= MAX_ITEMS + slack


class _Fractions:
    """Reads numbers with a fraction, up to MAX_ITEMS of them, all finite."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, digits: str) -> float:
        self._number += 1
        if self._number > MAX_ITEMS:
            message = f"expected a JSON body with at most {MAX_ITEMS} numbers with a fraction, got more"
            raise ApiError(400, message, code="too_many_values")
        value = float(digits)
        if math.isinf(value):
            raise ValueError(f"expected a finite number, got {digits:.40}")
        return value


def _refuse(constant: str) -> NoReturn:
    """Refuse NaN and infinity, which Python reads and JSON doesn't have: an answer that repeats them is no JSON."""
    raise ValueError(f"expected a finite number, got {constant}")


def _exceeds(text: str, marks: str, most: int) -> bool:
    """Whether a text has more than `most` of these marks outside of strings. O(text).

    If it has many strings, they are looked at one by one, so that other threads may run.
    """
    if text.count('"') <= _FEW_QUOTES:
        return sum(map(re.sub(_STRING, "", text, flags=re.DOTALL).count, marks)) > most
    number = 0
    for found in re.finditer(f"[{re.escape(marks)}]|{_STRING}", text, re.DOTALL):
        if text[found.start()] != '"':
            number += 1
            if number > most:
                return True
    return False
