"""The schemes of URLs, and the places that they name."""

from collections.abc import Iterable

from kvblocks.arguments import check_text, listed, wrong
from kvblocks.engine.tiers.options import TierOptions
from kvblocks.engine.tiers.place import Place
from kvblocks.engine.tiers.places import DiskPlace, HostPlace
from kvblocks.engine.tiers.store_place import StorePlace
from kvblocks.errors import InvalidArgumentError
from kvblocks.tiers.store import SCHEMES

_PLACES: dict[str, type[Place]] = {"host": HostPlace, "disk": DiskPlace, **dict.fromkeys(SCHEMES, StorePlace)}


def register_place(scheme: str, place: type[Place]) -> None:
    """Make `Engine(tiers=["SCHEME:ADDRESS"])` open a place of this class. Raises InvalidArgumentError. O(1).

    scheme: lower-case letters, digits and signs, without a colon. A scheme that is taken is refused, unless the class
    is the same.
    """
    if not check_text("register_place: scheme", scheme) or ":" in scheme:
        raise wrong("register_place: scheme", "a text without a colon", scheme)
    if not isinstance(place, type) or not issubclass(place, Place):
        raise wrong("register_place: place", "a subclass of Place", place)
    if _PLACES.setdefault(scheme, place) is not place:
        raise wrong("register_place: scheme", f"one that is not yet {_PLACES[scheme].__name__}", scheme)


def place_of(options: TierOptions) -> type[Place]:
    """Return the class of a tier's place. Raises InvalidArgumentError for an unknown scheme. O(1)."""
    found = _PLACES.get(options.scheme)
    if found is None:  # the text isn't shown, since it may hold a password
        raise InvalidArgumentError(f"tiers: expected a URL with one of the schemes {', '.join(_PLACES)}; got another")
    return found


def read_tiers(tiers: Iterable[str | TierOptions]) -> tuple[TierOptions, ...]:
    """Turn a user's tiers into options, which their places check. Opens nothing. Raises InvalidArgumentError."""
    if isinstance(tiers, str):  # it isn't shown, since it may hold a password
        raise wrong("tiers", "a list of URLs and TierOptions", str)
    given = listed("tiers", "a list of URLs and TierOptions", tiers)
    read = tuple(one if isinstance(one, TierOptions) else TierOptions(one) for one in given)
    for options in read:
        place_of(options).check(options)
    return read
