"""What the walks of one kind met together: walks that never meet a case prove nothing about it.

Each walk adds what it met, and one test asks for the sums. No single walk is asked, since a change of any rule moves
what one seed meets, while the sums stay about the same.
"""

from collections import Counter
from collections.abc import Mapping

import pytest


class Coverage:
    def __init__(self) -> None:
        self.met: Counter[str] = Counter()
        self.num_walks = 0

    def add(self, met: Mapping[str, int]) -> None:
        """Add what one walk met."""
        self.met.update(met)
        self.num_walks += 1

    def check(self, num_walks: int, least: Mapping[str, int]) -> None:
        """Check the sums of `num_walks` walks; skip where fewer of them ran, in this process and without a failure."""
        if self.num_walks < num_walks:
            pytest.skip(f"needs all {num_walks} walks, got {self.num_walks}")
        assert self.num_walks == num_walks
        short = {name: f"{self.met[name]} < {number}" for name, number in least.items() if self.met[name] < number}
        assert not short, f"met too seldom: {short}"
