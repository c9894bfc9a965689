"""Checks whether the time to an answer reveals what another salt has cached."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from statistics import median

from kvblocks.verify.server.finding import Finding
from kvblocks.verify.server.patient import NUMS_OF_WORDS, Patient
from kvblocks.verify.server.prompts import Words
from kvblocks.verify.server.target import TargetError

_NUM_PAIRS = 12
_INTERVAL = (2, -3)  # the third least and the third largest of twelve: the median is between them in 96 % of all cases
_CHANCE = 0.01  # below it, a difference is looked for once more; if it is there again, it is a finding
_SAVED = 0.2  # of what a hit saves. Less is no hit
_HIT = 0.7  # of the time of a new prompt: a hit that takes longer isn't seen in the time


def timing(patient: Patient, seed: str) -> Iterator[Finding]:
    """A prompt that another `cache_salt` has cached takes as long as a new one."""
    words = patient.words(f"{seed}/{patient.run_name()}")  # nobody has asked these
    known = _visible_hit(patient, words)
    if known is None:
        patient.measured["timing"] = "a hit under the same salt takes as long as a new prompt, so times show nothing"
        return
    num_words, saved = known
    for _ in range(2):
        pairs = _Pairs(*_measure(patient, words, num_words), saved)
        patient.measured["timing"] = str(pairs)
        if pairs.chance >= _CHANCE or pairs.share < _SAVED:
            return
    what = f"prompts of {num_words} words that were asked with another salt only, and new ones, in {_NUM_PAIRS} pairs"
    yield Finding("timing", what, f"{median(pairs.new):.4f} s, as new ones", f"{median(pairs.other):.4f} s; {pairs}")


@dataclass(frozen=True)
class _Pairs:
    """Seconds for prompts that another salt has cached, and for new ones. saved: seconds that a hit saves."""

    other: list[float]
    new: list[float]
    saved: float

    @property
    def shares(self) -> list[float]:
        """How much each pair saved, of what a hit saves, in order."""
        return sorted((new - other) / self.saved for other, new in zip(self.other, self.new, strict=True))

    @property
    def share(self) -> float:
        """The median of them."""
        return median(self.shares)

    @property
    def chance(self) -> float:
        """How likely it is, if the salt doesn't matter, that as much is saved: Wilcoxon's signed ranks, exact."""
        by_size = sorted(self.shares, key=abs)
        seen = sum(rank for rank, share in enumerate(by_size, 1) if share > 0)
        sums = [
            sum(rank for rank, sign in enumerate(signs, 1) if sign) for signs in product((0, 1), repeat=len(by_size))
        ]
        return sum(found >= seen for found in sums) / len(sums)

    def __str__(self) -> str:
        low, high = (self.shares[place] for place in _INTERVAL)
        return (
            f"prompts of another salt saved {self.share:.0%} of the time that a hit saves ({low:.0%} to {high:.0%} with"
            f" 96 % confidence; p = {self.chance:.2g})"
        )


def _visible_hit(patient: Patient, words: Words) -> tuple[int, float] | None:
    """How long prompts must be so that a hit is seen in the time, and how many seconds it saves. None: it isn't."""
    for number in NUMS_OF_WORDS:
        if number < patient.num_words:
            continue
        salt, new, hit = patient.run_name(), [], []
        try:
            for _ in range(3):
                prompt = words.draw(number)
                new.append(patient.ask(prompt, salt, max_tokens=1).seconds)
                hit.append(patient.ask(prompt, salt, max_tokens=1).seconds)
        except TargetError:  # too long for the model
            return None
        if median(hit) < _HIT * median(new):
            return number, median(new) - median(hit)
    return None


def _measure(patient: Patient, words: Words, num_words: int) -> tuple[list[float], list[float]]:
    """Seconds for prompts that another salt has cached, and for new ones, in pairs."""
    first, second = patient.run_name(), patient.run_name()
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(_NUM_PAIRS):
        prompts = words.draw(num_words), words.draw(num_words)
        patient.ask(prompts[0], first, max_tokens=1)
        turn = words.integer(0, 1)  # either comes first
        for which in (turn, 1 - turn):
            seconds[which].append(patient.ask(prompts[which], second, max_tokens=1).seconds)
    return seconds
