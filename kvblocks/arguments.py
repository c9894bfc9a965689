"""Checks of what callers pass, the same in both builds.

Compiled code checks a parameter annotated `int` or `str` before our first line runs, and raises a bare TypeError. So
parameters that we check ourselves are annotated with protocols, which say the same to a type checker and which
compiled code passes through.
"""

from operator import index
from typing import Any, Protocol, SupportsIndex

from kvblocks.errors import InvalidArgumentError


class Text(Protocol):
    """A str, to a type checker."""

    def encode(self) -> bytes:
        """Return the text in UTF-8."""


def check_count(name: str, value: SupportsIndex, low: int, high: int | None = None) -> int:
    """Return `value` as an int if it is one (NumPy's too) from `low` to `high`; else raise InvalidArgumentError."""
    try:
        number = low - 1 if isinstance(value, bool) else index(value)
    except TypeError:
        number = low - 1
    if number < low or (high is not None and number > high):
        span = f"an int of at least {low}" if high is None else f"an int from {low} to {high}"
        raise InvalidArgumentError(f"{name}: expected {span}, got {value!r}")
    return number


def check_name(name: str, value: Text | None) -> str | None:
    """Return `value` if it is None or a non-empty str that UTF-8 can encode, else raise InvalidArgumentError."""
    text: Any = value
    if text is None:
        return None
    if not isinstance(text, str) or not text:
        raise InvalidArgumentError(f"{name}: expected a non-empty str or None, got {text!r}")
    return check_text(name, text)


def check_text(name: str, text: str) -> str:
    """Return `text` if UTF-8 can encode it, else (a lone surrogate) raise InvalidArgumentError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"{name}: expected text that UTF-8 can encode, got {text!r}: {error.reason}"
        ) from None
    return text


def is_number(value: Any) -> bool:
    """Whether `value` is an int or a float, and neither a bool nor NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value  # noqa: PLR0124  # NaN
