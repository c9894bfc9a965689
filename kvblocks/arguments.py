"""Checks of the arguments that callers pass, the same in both builds.

The rules:

- A call with an argument of a wrong type or value raises InvalidArgumentError, or another KVBlocksError. The message
  says what was expected and what the call got. The call has changed nothing.
- A wrong number of arguments, or an unknown name, is Python's TypeError.
- The caller's own code (`__hash__`, `__eq__`, an iterator, a hash function) may raise while a call runs it. Such an
  error is passed on as it is, and the call has changed nothing.
- The caller's objects are trusted to report their own length, text and bytes truthfully.
- Some errors of the caller's code do become InvalidArgumentError. TypeError, ValueError and OverflowError from
  `__index__` or `__float__` mean, as everywhere in Python, that the object is no such number. A TypeError from the
  trial call of a function means that the function has a wrong signature.

In the compiled build, a parameter annotated with a compiled class, `int`, `str` or `bool` is checked before our first
line runs, and a wrong one raises a bare TypeError. Parameters of public calls are therefore annotated with protocols:
`Given[Sequence]` for a Sequence, SupportsIndex for an int. To a type checker they mean the same, and compiled code
doesn't check them. On the hot path, a call that takes an object of our own looks at its type only after something went
wrong.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from collections.abc import Set as AbstractSet
from numbers import Real
from operator import index
from typing import Any, Final, Protocol, SupportsFloat, SupportsIndex, TypeVar

from kvblocks.errors import InvalidArgumentError

T_co = TypeVar("T_co", covariant=True)

_MAX_COUNT = 2**63 - 1
_SMALL: Final = 2**60  # compiled code compares with it quickly, unlike with 2**63 - 1
_MAX_SHOWN = 200  # characters of a value in an error message


class Given(Protocol[T_co]):
    """To a type checker, a T. At run time, the call that takes it checks its type."""

    @property  # type: ignore[misc]  # read-only, so that a subclass of T is one too
    def __class__(self) -> "type[T_co]":  # type: ignore[override]
        """T or a class derived from it."""


Text = Given[str]
"""A str."""

Flag = Given[bool]
"""True or False."""


def shown(value: object) -> str:
    """Return `value` as an error message shows it: its repr, cut if it is long. Never raises."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # an int too long to print, or whatever somebody's __repr__ raises
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def counted(number: int, noun: str, form: str = "") -> str:
    """Return a number with its noun: "1 block", "2 blocks". form: how the number is formatted, such as ","."""
    return f"{number:{form}} {noun}{'' if number == 1 else 's'}"


def wrong(name: str, expected: str, value: object) -> InvalidArgumentError:
    """Return the InvalidArgumentError for an argument that isn't what was expected."""
    return InvalidArgumentError(f"{name}: expected {expected}, got {shown(value)}")


def pip_install(extras: str) -> str:
    """Return the command that installs what `extras` bring, for an error message.

    extras: "engine" or another extra, or several separated by commas. pip finds an installed kvblocks by its name,
    whether it came from a checkout, a wheel or an index. For a checkout that isn't installed, the command names its
    folder.
    """
    return f"pip install 'kvblocks[{extras}]' (in a checkout that isn't installed: '.[{extras}]')"


def is_a(value: object, kind: type) -> bool:
    """Whether the real type of `value` is `kind` or a subclass, whatever its `__class__` says."""
    return issubclass(type(value), kind)


def as_int(value: object) -> int | None:
    """Return `value` as an int if it is one or has `__index__` (NumPy's integers do), else None. A bool gives None."""
    given: Any = value
    if type(given) is bool:
        return None
    try:
        return index(given)
    except (TypeError, ValueError, OverflowError):
        return None


def check_count(name: str, value: SupportsIndex, low: int, high: int | None = None) -> int:
    """Return `value` as an int if it is one (NumPy's too) from `low` to `high`; else raise InvalidArgumentError.

    high: None means 2**63 - 1.
    """
    given: Any = value
    if type(given) is int:
        number: int = given
    else:
        found = as_int(given)
        number = low - 1 if found is None else found
    if number < low or (high is not None and number > high):
        raise wrong(name, f"an int of at least {low}" if high is None else f"an int from {low} to {high}", value)
    if number > _SMALL and high is None and number > _MAX_COUNT:
        raise wrong(name, f"an int from {low} to {_MAX_COUNT}", value)
    return number


def asked_once(value: SupportsIndex) -> SupportsIndex:
    """Return `value` as an int if it is one, so that its `__index__` runs only once; otherwise return `value`.

    A later check refuses whatever isn't an int.
    """
    number = as_int(value)
    return value if number is None else number


def check_integer(name: str, value: SupportsIndex) -> int:
    """Return `value` as an int if it is one (NumPy's too), of any size and sign; else raise InvalidArgumentError."""
    number = as_int(value)
    if number is None:
        raise wrong(name, "an int", value)
    return number


def check_number(name: str, value: SupportsFloat, expected: str = "a number") -> int | float:
    """Return `value` as an int or float if it is a real number (NumPy's too) and not NaN.

    Otherwise raise InvalidArgumentError.
    """
    given: Any = value
    number = as_int(given)
    if number is not None:
        return number
    if is_number(given):
        try:
            return float(given)
        except (TypeError, ValueError, OverflowError):  # a Fraction may be too large
            pass
    raise wrong(name, expected, value)


def check_share(name: str, value: SupportsFloat, expected: str = "a share from 0.0 to 1.0") -> float:
    """Return `value` as a float if it is a number from 0 to 1, else raise InvalidArgumentError."""
    number = check_number(name, value, expected)
    if not 0 <= number <= 1:
        raise wrong(name, expected, value)
    return float(number)


def check_id(name: str, value: Hashable) -> None:
    """Raise InvalidArgumentError unless `value` can be a dict key: it has one hash, and is equal to itself."""
    try:
        is_steady = hash(value) == hash(value)
    except (TypeError, ValueError):  # ValueError from a memoryview
        raise wrong(name, "something hashable", value) from None
    if not is_steady:
        raise wrong(name, "something whose hash stays the same", value)
    given: Any = value
    if not given == given:  # noqa: PLR0124  # NaN: a dict may hold it several times
        raise wrong(name, "something that is equal to itself", value)


def check_clock(name: str, now: Callable[[], float]) -> None:
    """Raise InvalidArgumentError unless `now` is a function that returns a number. Calls it once."""
    given: Any = now
    if not callable(given):
        raise wrong(name, "a function that returns the time", given)
    try:
        time = given()
    except TypeError as error:
        raise wrong(name, f"a function that returns the time; it says {error}", given) from error
    check_number(name, time, "a function that returns the time, a number")


def check_flag(name: str, value: Flag) -> bool:
    """Return `value` if it is True or False, else raise InvalidArgumentError."""
    given: Any = value
    if given is not True and given is not False:
        raise wrong(name, "True or False", value)
    return given is True


def check_name(name: str, value: Text | None) -> str | None:
    """Return `value` if it is None or a non-empty str that UTF-8 can encode, else raise InvalidArgumentError."""
    text: Any = value
    if text is None:
        return None
    plain = plain_text(text) if is_a(text, str) else ""
    if not plain:
        raise wrong(name, "a non-empty str or None", value)
    return check_text(name, plain)


def plain_text(text: str) -> str:
    """Return the characters of `text` as a plain str; str() of a member of an Enum would give its name instead."""
    return text if type(text) is str else "".join([text])  # noqa: FLY002  # an f-string has that name, too


def check_text(name: str, text: str) -> str:
    """Return `text` if UTF-8 can encode it. If not (it has a lone surrogate), raise InvalidArgumentError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"{name}: expected text that UTF-8 can encode, got {shown(text)}: {error.reason}"
        ) from None
    return text


def check_one_of(name: str, value: object, names: Collection[str]) -> None:
    """Raise InvalidArgumentError unless `value` is one of the texts `names`."""
    if not is_a(value, str) or value not in names:
        raise wrong(name, f"one of {', '.join(names)}", value)


def has_no_order(value: object) -> bool:
    """Whether `value` is a set or a dict, whose items have no order that the caller chose."""
    return issubclass(type(value), (AbstractSet, Mapping))


def listed(name: str, expected: str, value: object, *, in_order: bool = False) -> list[Any]:
    """Return the items of an iterable as a list. Raises InvalidArgumentError if `value` is no iterable.

    A str or bytes doesn't count as an iterable. in_order: whether the order means something, so that a set or a dict
    doesn't count either. An error from the iterator itself is passed on.
    """
    given: Any = value
    if type(given) is list or type(given) is tuple:
        return [*given]
    if is_a(given, str) or is_a(given, bytes) or not hasattr(given, "__iter__"):
        raise wrong(name, expected, value)
    if in_order and has_no_order(given):
        raise wrong(name, f"{expected}, in order", value)
    try:
        iterator = iter(given)
    except TypeError:
        raise wrong(name, expected, value) from None
    return list(iterator)


def is_number(value: Any) -> bool:
    """Whether `value` is a real number (an int, a float, one of NumPy's), but not a bool and not NaN."""
    return is_a(value, Real) and type(value) is not bool and bool(value == value)  # noqa: PLR0124  # NaN
