"""Size limits for schemas, patterns and texts. The compiler's own limits would allow far more time and memory."""

import json
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from math import lcm
from typing import Any

from kvblocks.errors import InvalidArgumentError

MAX_BYTES = 64 * 2**10
"""The most bytes of a schema, of a regular expression, or of all texts to choose from.

The slowest take about 5 µs per byte to compile.
"""

MAX_TEXT = 4096
"""The most bytes of one text to choose from, of a regular expression, or of a string or name in a schema.

Each generated token costs about 0.25 µs for each of these bytes. Texts in a schema that are only for people, such as
descriptions, don't count.
"""

MAX_DEPTH = 64
MAX_MULTIPLE = 10_000
"""The largest least common multiple of all `multipleOf` in a schema: the automaton has that many states."""

_MAX_EXPONENT = 12
_FOR_PEOPLE = frozenset({"description", "title", "$comment", "default"})


def check_schema(schema: Any) -> str:
    """Return a JSON schema as text. Raises InvalidArgumentError for one that isn't accepted. O(size)."""
    if not isinstance(schema, dict):
        raise InvalidArgumentError(f"expected a JSON schema that is an object, got {type(schema).__name__}")
    check_form_size(schema)
    try:
        values = list(_walk(schema))
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"expected a JSON schema, got an error: {error}") from error
    check_size(text)
    for string in values:
        if isinstance(string, str):
            check_text(string)
    if "x-guidance" in schema:
        raise InvalidArgumentError("expected a JSON schema without x-guidance, the compiler's settings, got some")
    multiples = [value["multipleOf"] for value in values if isinstance(value, dict) and "multipleOf" in value]
    if _common_multiple(multiples) > MAX_MULTIPLE:
        raise InvalidArgumentError(
            f"multipleOf: expected numbers whose least common multiple is at most {MAX_MULTIPLE} units of the last"
            f" decimal place, got {multiples!s:.80}"
        )
    return text


def check_form_size(form: Any) -> None:
    """Raise InvalidArgumentError for a schema, pattern or list of texts that is certainly too long.

    A cheap check before parsing: it counts only values, not the JSON syntax around them, and stops at the limit.
    O(MAX_BYTES).
    """
    size, rest = 0, [form]
    while rest:
        value = rest.pop()
        if isinstance(value, (dict, list, tuple)):
            size += len(value)
            if size <= MAX_BYTES:
                rest += [*value, *value.values()] if isinstance(value, dict) else value
        else:
            size += len(value) if isinstance(value, str) else 1
        if size > MAX_BYTES:
            raise InvalidArgumentError(f"expected at most {MAX_BYTES} bytes, got more")


def check_size(text: str) -> str:
    """Return a text to compile. Raises InvalidArgumentError if it is too long. O(size)."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise InvalidArgumentError(f"expected at most {MAX_BYTES} bytes, got {size}")
    return text


def check_text(text: str) -> str:
    """Return a text that generated tokens are matched against.

    Raises InvalidArgumentError if it is too long or not valid UTF-8. O(size).
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"expected texts that UTF-8 can encode, got an error: {error}") from error
    if size > MAX_TEXT:
        raise InvalidArgumentError(f"expected texts, names and patterns of at most {MAX_TEXT} bytes, got one of {size}")
    return text


def _walk(value: Any, depth: int = 0) -> Iterator[Any]:
    """All values and names in a JSON value, itself included, except texts that are only for people.

    Raises ValueError for one that is nested too deep.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    yield value
    if isinstance(value, dict):
        yield from value
        value = [item for name, item in value.items() if name not in _FOR_PEOPLE or not isinstance(item, str)]
    if isinstance(value, list):
        for item in value:
            yield from _walk(item, depth + 1)


def _common_multiple(values: list[Any]) -> int:
    """The least common multiple in units of the last decimal place. What isn't a number counts as 1.

    The compiler refuses such values.
    """
    numbers = []
    for value in values:
        try:
            number = Decimal(str(value)).normalize()
        except InvalidOperation:
            continue
        if not number.is_finite() or not number:
            continue
        if abs(number.adjusted()) > _MAX_EXPONENT:
            return MAX_MULTIPLE + 1
        numbers.append(number)
    places = max([-int(number.as_tuple().exponent) for number in numbers], default=0)
    return lcm(*[abs(int(number.scaleb(max(0, places)))) for number in numbers])
