"""`flag`: a settings field that is also an option of the command line, with its name, help and range in one place."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvblocks.arguments import check_count


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """How a field is an option of the command line.

    help, panel: its text in `--help`, and the group that it is shown in. name: the option's name; None: the field's,
    with dashes. kind: the type that the command line reads; None: the field's type. read: converts what it reads to the
    field's value; None: no conversion. envvar: an environment variable that may hold the value. least, most: the range
    of a count. is_secret: `repr` doesn't show the value.
    """

    help: str
    panel: str
    name: str | None = None
    kind: Any = None
    read: Callable[[Any], Any] | None = None
    envvar: str | None = None
    least: int | None = None
    most: int | None = None
    is_secret: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """A flag as the command line needs it. field: the field's name in the settings.

    default: the value if it isn't given.
    """

    field: str
    name: str
    kind: Any
    default: Any
    flag: Flag


def flag(text: str, panel: str, *, default: Any = None, **more: Any) -> Any:
    """Return a dataclass field that is also an option. text: its help. more: further fields of `Flag`. O(1)."""
    made = Flag(help=text, panel=panel, **more)
    return field(default=default, repr=not made.is_secret, metadata={"flag": made})


def options_of(settings: Any) -> Iterator[Option]:
    """Yield the options of settings or of a settings class, in the order of the fields."""
    for one in fields(settings):
        made = one.metadata.get("flag")
        if made is not None:
            default = one.default if made.read is None else False if made.kind is bool else None
            name = made.name or "--" + one.name.replace("_", "-")
            yield Option(one.name, name, made.kind or one.type, default, made)


def name_of(settings: Any, field: str) -> str:
    """Return the name of a field's option, such as "--num-blocks", for errors. O(fields)."""
    return next(option.name for option in options_of(settings) if option.field == field)


def values_of(settings: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert what the command line read, by field, to the fields' values. Options that weren't given are left out."""
    return {
        option.field: given[option.field] if option.flag.read is None else option.flag.read(given[option.field])
        for option in options_of(settings)
        if given[option.field] != option.default
    }


def check_ranges(settings: Any) -> None:
    """Raise InvalidArgumentError, naming the option, unless all counts are in their ranges. O(fields)."""
    for option in options_of(settings):
        value = getattr(settings, option.field)
        if option.flag.least is not None and value is not None:
            check_count(option.name, value, option.flag.least, option.flag.most)
