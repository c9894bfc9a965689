"""Reads the fields of a JSON object, each with its type and range, and refuses unknown fields.

An unknown field is an error, as in OpenAI's API, since otherwise a misspelt `max_token` would go unnoticed.
"""

import difflib
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from kvblocks.server.errors import ApiError

MAX_KEPT_TEXT = 1024
"""The most characters of a salt or a session's name. The number of kept names is bounded by the number of blocks."""

_SHOWN = 80
_MAX_COUNT = 2**64 - 1  # no field needs a larger number, and its digits could be too many for a message


def show(value: object) -> str:
    """Return a value as an error message shows it, in at most one line. Reads no more of it than that."""
    text = ""
    for part in _parts(value):
        text += part
        if len(text) > _SHOWN:
            return f"{text[:_SHOWN]}..."
    return text


def _parts(value: object) -> Iterator[str]:
    """What `ascii` makes of a JSON value, part by part. A part is at most some hundred characters long."""
    if isinstance(value, list):
        yield "["
        for index, item in enumerate(value):
            yield ", " if index else ""
            yield from _parts(item)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for index, (name, item) in enumerate(value.items()):
            yield ", " if index else ""
            yield from (*_parts(name), ": ")
            yield from _parts(item)
        yield "}"
    else:
        yield ascii(value[: _SHOWN + 1] if isinstance(value, str) else value)


class Fields:
    """The fields of `body`, a parsed JSON object. A field that is null counts as absent.

    name: the object's name in error messages, "" for the whole body. Raises ApiError unless `body` is an object.
    """

    def __init__(self, body: Any, name: str = "") -> None:
        if not isinstance(body, dict):
            what = f"{name}: expected" if name else "expected the body to be"
            raise ApiError(400, f"{what} a JSON object, got {show(body)}", param=name or None)
        self._values: Mapping[str, Any] = {key: value for key, value in body.items() if value is not None}
        self._prefix = f"{name}." if name else ""
        self._known: set[str] = set()
        self._refused: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def take(self, name: str) -> Any:
        """Return a field's value, or None if it is absent. From now on the field counts as known."""
        self._known.add(name)
        return self._values.get(name)

    def error(self, name: str, expected: str) -> ApiError:
        """Return the error for a field whose value isn't as expected."""
        full = self._prefix + name
        got = show(self._values[name]) if name in self._values else "none"
        return ApiError(400, f"{full}: expected {expected}, got {got}", param=full)

    def check_unicode(self, name: str, text: str) -> None:
        """Raise ApiError for a field's text that UTF-8 can't encode. O(length)."""
        check_unicode(self._prefix + name, text, self._prefix + name)

    def count(self, name: str, low: int, high: int | None = None) -> int | None:
        """Return an integer from `low` to `high`. A float such as 1.0 is refused, as in OpenAI's API."""
        value = self.take(name)
        if value is None:
            return None
        most = _MAX_COUNT if high is None else high
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= most:
            span = f"at least {low}" if high is None else f"from {low} to {high}"
            raise self.error(name, f"an integer {span}")
        return value

    def number(self, name: str, low: float, high: float = math.inf) -> float | None:
        """Return a finite number from `low` to `high`."""
        value = self.take(name)
        if value is None:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (low <= value <= high) or value > sys.float_info.max:
            raise self.error(name, f"a number of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a boolean; False if the field is absent."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "true or false")
        return bool(value)

    def text(self, name: str, most: int | None = None) -> str | None:
        """Return a text that isn't empty and that UTF-8 can encode. most: the most characters; None: no limit."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            raise self.error(name, "a text that is not empty")
        self.check_unicode(name, value)
        if most is not None and len(value) > most:
            raise self.error(name, f"a text of at most {most} characters")
        return value

    def kept_text(self, name: str) -> str | None:
        """Return a text of at most MAX_KEPT_TEXT characters, for names that are kept while something is cached."""
        return self.text(name, MAX_KEPT_TEXT)

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Return one text, or a list of at most `most` texts, as a tuple; empty if the field is absent."""
        value = self.take(name)
        if value is None:
            return ()
        items = [value] if isinstance(value, str) else value
        if (
            not isinstance(items, list)
            or len(items) > most
            or not all(isinstance(item, str) and item for item in items)
        ):
            raise self.error(name, f"a text, or a list of at most {most}, none of them empty")
        for item in items:
            self.check_unicode(name, item)
        return tuple(items)

    def refuse(self, name: str, neutral: Collection[object], why: str) -> None:
        """Refuse a field that this server doesn't have, unless its value is in `neutral`.

        why: the reason in the error.
        """
        value = self.take(name)
        self._refused.add(name)
        if value is not None and not any(type(value) is type(item) and value == item for item in neutral):
            raise self.error(name, f"none, since {why}")

    def refuse_all(self, refused: Mapping[str, tuple[Collection[object], str]]) -> None:
        """Call `refuse` for many fields. refused: `neutral` and `why` by field name."""
        self._known.update(refused)
        self._refused.update(refused)
        for name in [name for name in refused if name in self._values]:
            self.refuse(name, *refused[name])

    def ignore(self, names: Collection[str]) -> None:
        """Ignore fields that change nothing in an answer."""
        self._known.update(names)

    def refuse_unknown(self) -> None:
        """Refuse fields that nobody has taken. The error suggests which known field may have been meant."""
        unknown = set(self._values) - self._known
        if unknown:
            name = min(unknown)
            full, known = self._prefix + name, sorted(self._known - self._refused)
            message = f"expected known fields ({', '.join(known)}), got {show(full)}{meant(name, known)}"
            raise ApiError(400, message, param=ascii(full)[1:-1][:_SHOWN], code="unknown")


def meant(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message that suggests which of `known` may have been meant by `name`; "" if none."""
    found = difflib.get_close_matches(name[:_SHOWN], known, 1, 0.75)
    return f": did you mean {found[0]}?" if found else ""


def check_unicode(name: str, text: str, param: str | None) -> None:
    """Raise ApiError for a text that UTF-8 can't encode, because of a lone surrogate, which JSON allows. O(length)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"a lone surrogate, {ascii(text[error.start])[1:-1]}, as character {error.start + 1}"
        raise ApiError(400, f"{name}: expected a text of valid Unicode, got {got}", param=param) from None
