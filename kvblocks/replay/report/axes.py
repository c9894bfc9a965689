"""Scales, which map numbers to places in a picture, frames and axes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvblocks.replay.report.markup import Attributes, Element, element, short

LETTER = 7.1
"""The width of a letter of size 12, in pixels: a little more than in most fonts."""


@dataclass(frozen=True)
class Scale:
    """Maps numbers from `low` to `high` to pixels from `start` to `end`, logarithmically if `is_log`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a number; for a number outside, that of the nearest end."""
        low, high, value = (math.log(x) if self.is_log else x for x in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def round_up(value: float) -> float:
    """Round a positive number up to 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * (1 - 1e-9))


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers from `low` to `high`, at most `most` + 1."""
    if high <= low:
        return [low]
    step = round_up((high - low) / most)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def width_of(text: str) -> float:
    """Return the approximate width of a text in pixels."""
    return LETTER * len(text)


@dataclass(frozen=True)
class Frame:
    """The inner rectangle of a chart, between its axes."""

    left: float
    top: float
    right: float
    bottom: float


def y_axis(frame: Frame, scale: Scale, values: list[float], shown: Callable[[float], str] = short) -> list[Element]:
    """Return the lines across a chart, with a number at the left of each."""
    made = []
    for value in values:
        y = scale(value)
        made.append(element("line", {"class": "gridline", "x1": frame.left, "x2": frame.right, "y1": y, "y2": y}))
        made.append(text(frame.left - 6, y + 4, shown(value), "end"))
    return made


def x_axis(frame: Frame, scale: Scale, values: list[float], shown: Callable[[float], str] = short) -> list[Element]:
    """Return the axis below a chart, with as many of the numbers as fit."""
    line: Attributes = {"class": "axis", "x1": frame.left, "x2": frame.right, "y1": frame.bottom, "y2": frame.bottom}
    made, last = [element("line", line)], -math.inf
    for value in values:
        x, name = scale(value), shown(value)
        made.append(element("line", {"class": "axis", "x1": x, "x2": x, "y1": frame.bottom, "y2": frame.bottom + 4}))
        if x - width_of(name) / 2 > last + 6:
            made.append(text(x, frame.bottom + 18, name, "middle"))
            last = x + width_of(name) / 2
    return made


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> Element:
    """Return a text with its baseline at y. anchor: which point of the text is at x."""
    attributes: Attributes = {"x": x, "y": y, "text-anchor": anchor}
    if kind:
        attributes["class"] = kind
    return element("text", attributes, words)


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions close to the wanted ones, at least `gap` apart and between `low` and `high` if there is room."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    placed = list(wanted)
    for before, after in zip([None, *order], order, strict=False):
        placed[after] = max(placed[after], low if before is None else placed[before] + gap)
    limit = high
    for index in reversed(order):
        placed[index] = min(placed[index], limit)
        limit = placed[index] - gap
    return placed
