"""Parses options of `kvblocks replay`. Errors name the option."""

import re

from kvblocks.arguments import shown
from kvblocks.errors import InvalidArgumentError
from kvblocks.replay.sweep import DEFAULT_MEAN_S
from kvblocks.replay.trace import Trace

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)(%?)")
_BYTES = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([kMGT]?)B?")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_sizes(option: str, text: str, num_unique_blocks: int) -> tuple[int, ...]:
    """Parse numbers of blocks. "1%,2%,5000" means two shares of the trace's unique blocks, and a number.

    Each is at least 1, and duplicates are removed. Raises InvalidArgumentError.
    """
    return tuple(dict.fromkeys(parse_size(option, part, num_unique_blocks) for part in text.split(",")))


def parse_size(option: str, text: str, num_unique_blocks: int) -> int:
    """Parse a number of blocks, at least 1, such as "2%" or "5000". Raises InvalidArgumentError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidArgumentError(f"{option}: expected a number of blocks, or a share such as 2%, got {shown(text)}")
    number, percent = match.groups()
    if not percent and "." in number:
        raise InvalidArgumentError(f"{option}: expected whole blocks, got {shown(text)}")
    size = float(number) / 100 * num_unique_blocks + 1e-9 if percent else int(number)
    if not (percent or size) or float(number) == 0 or size > 2**31:
        raise InvalidArgumentError(f"{option}: expected 1 to 2**31 blocks, or a share above 0, got {shown(text)}")
    return max(1, int(size))


def parse_bytes(option: str, text: str) -> int:
    """Parse a number of bytes, at least 1, such as "24576", "39.5MB" or "60G". A k is 1,000.

    Raises InvalidArgumentError.
    """
    match = _BYTES.fullmatch(text.strip())
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2]] + 1e-6)
    if not 0 < size < 2**50:
        raise InvalidArgumentError(f"{option}: expected bytes such as 24576, 39.5MB or 60GB, got {shown(text)}")
    return size


def parse_memory(option: str, text: str, num_unique_blocks: int, block_bytes: int) -> tuple[int, ...]:
    """Parse sizes in bytes. "60GB,5%,200" is bytes, a share of the trace's unique blocks, and a number of blocks.

    block_bytes: the bytes of a block of the trace. Duplicates are removed. Raises InvalidArgumentError.
    """
    parts = [part.strip() for part in text.split(",")]
    sizes = [
        parse_bytes(option, part) if part.endswith("B") else parse_size(option, part, num_unique_blocks) * block_bytes
        for part in parts
    ]
    return tuple(dict.fromkeys(sizes))


def parse_arrivals(text: str | None, trace: Trace) -> float | None:
    """Return the mean time in seconds between the beginnings of sessions; None for arrivals as recorded.

    text: "recorded", a number, or None, which means recorded if the trace says when sessions begin, else
    DEFAULT_MEAN_S. Raises InvalidArgumentError.
    """
    if text is None:
        return DEFAULT_MEAN_S if trace.times_are_relative else None
    if text == "recorded":
        return None
    try:
        mean_s = float(text)
    except ValueError:
        mean_s = 0.0
    if not 0 < mean_s < 1e9:
        raise InvalidArgumentError(f"--arrivals: expected 'recorded' or seconds above 0, got {shown(text)}")
    return mean_s


def parse_range(text: str) -> tuple[int, int]:
    """Parse two numbers such as "200:355". Raises InvalidArgumentError."""
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if match is None:
        raise InvalidArgumentError(f"--sessions: expected FROM:TO, such as 200:355, got {shown(text)}")
    return int(match[1]), int(match[2])
