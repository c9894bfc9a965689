"""`Closed`: what the public classes have in common, so that the plain and the compiled build treat them alike.

Compiled code calls methods of its classes directly, so it knows nothing of a subclass made in Python. And it copies an
object as an empty one, since it keeps attributes where `copy` and `pickle` don't look.
"""

from typing import Any, NoReturn

_PACKAGE = "kvblocks."


class Closed:
    """Base of the public classes that own blocks or refer to them. They can't be subclassed, copied or pickled.

    The package itself derives classes from some of them. Records (events, statistics, errors) and the kinds of layers
    have other bases: they can be copied and pickled.
    """

    __slots__ = ()

    @classmethod
    def __init_subclass__(cls, **_: Any) -> None:
        """Raise TypeError, except for a class of this package."""
        check_subclass(cls, Closed)

    def __reduce__(self) -> NoReturn:
        """Raise TypeError. A copy would own, or refer to, the same blocks."""
        raise TypeError(f"a {type(self).__name__} can't be copied or pickled; make a new one")


def check_subclass(cls: type, family: type, instead: str = "") -> None:
    """Raise TypeError unless `cls`, which is derived from a class that is closed, is a class of this package.

    family: the base of all classes that `cls` may not be derived from. instead: what to do, if not to wrap the object.
    """
    if cls.__module__.startswith(_PACKAGE):
        return
    base = next(base for base in cls.__mro__[1:] if issubclass(base, family))
    wrap = "wrap one in a class of your own, or keep your own state beside it, in a dict by sequence_id for example"
    raise TypeError(f"{cls.__name__}: {base.__name__} can't be subclassed; {instead or wrap}")
