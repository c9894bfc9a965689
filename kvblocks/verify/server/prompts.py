"""Prompts whose continuation depends on the KV of a known place: lists of words that begin to repeat."""

import base64
import random
import struct
import zlib

# Short, frequent words, which are one token each, with the space before them, in nearly all vocabularies.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body back "
    "parent face level office door health person art war history party result change morning reason research girl guy "
    "moment air teacher force education foot boy age policy music market sense nation plan college interest death "
    "experience effect use class control field development role rate heart drug show leader light voice wife police "
    "mind price report decision son view relationship town road arm difference value building action season society "
    "tax director position player record paper space ground form event official matter center couple site project "
    "base star table need court oil situation cost industry figure street image phone data picture practice piece "
    "land product doctor wall news test movie north love step baby computer film tree source hair window culture "
    "chance brother energy period course summer plant opportunity term letter condition choice rule south husband "
    "floor campaign material population call economy hospital church risk fire future bank sport board"
)
_EACH = _WORDS.split(" ")


class Words:
    """Draws words from a seed. `tag` words at the beginning make the prompts of different runs differ."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def draw(self, number: int) -> list[str]:
        """Return `number` words."""
        return [self._random.choice(_EACH) for _ in range(number)]

    def integer(self, low: int, high: int) -> int:
        """Return a number from `low` to `high`, both included."""
        return self._random.randint(low, high)


def text(words: list[str]) -> str:
    """Return words as a prompt."""
    return " ".join(words)


def recalling(words: list[str], place: int, length: int = 5) -> list[str]:
    """Return a list that begins to repeat: all words are followed by `length` words from `place` on.

    So a model continues with the words after those, which it has to look up at `place`.
    """
    start = max(0, min(place, len(words) - length - 8))
    return [*words, *words[start : start + length]]


def picture(words: Words, size: int = 128, tile: int = 16) -> str:
    """Return a PNG image of tiles in random colors, as a `data:` URL. size, tile: in pixels."""
    num_tiles = size // tile
    colours = [bytes(words.integer(0, 255) for _ in range(3)) for _ in range(num_tiles * num_tiles)]
    rows = b""
    for row in range(size):
        first = row // tile * num_tiles
        rows += b"\0" + b"".join(colour * tile for colour in colours[first : first + num_tiles])
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    found = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        found += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return f"data:image/png;base64,{base64.b64encode(found).decode()}"
