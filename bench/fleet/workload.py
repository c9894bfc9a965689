"""What the clients of bench.fleet ask: conversations over a few system prompts. Each turn sends all that was said."""

import random
from dataclasses import dataclass

from kvblocks.engine.demo.script import HANDBOOK

_WORDS = HANDBOOK.split()


@dataclass(frozen=True)
class Conversation:
    """A client. start_s: when it begins; thinks_s: how long it waits before each turn but the first."""

    start_s: float
    system: str
    turns: tuple[str, ...]
    thinks_s: tuple[float, ...]


@dataclass(frozen=True)
class Sizes:
    """How large the workload is. spread_s: all conversations begin within it. think_s: the mean pause before a turn."""

    num_conversations: int = 12
    num_systems: int = 4
    num_turns: int = 5
    system_words: int = 90
    turn_words: int = 55
    max_tokens: int = 8
    spread_s: float = 20.0
    think_s: float = 5.0
    seed: int = 0

    @property
    def num_requests(self) -> int:
        """All turns of all conversations."""
        return self.num_conversations * self.num_turns


QUICK = Sizes(4, 2, 3, 30, 15, 3, 0.2, 0.05)


def make_conversations(sizes: Sizes) -> list[Conversation]:
    """Return the conversations, the same for the same sizes."""
    chooser = random.Random(sizes.seed)
    systems = [_words(chooser, sizes.system_words) for _ in range(sizes.num_systems)]
    which = [number % sizes.num_systems for number in range(sizes.num_conversations)]
    chooser.shuffle(which)
    return [
        Conversation(
            chooser.uniform(0, sizes.spread_s),
            systems[number],
            tuple(_words(chooser, sizes.turn_words) for _ in range(sizes.num_turns)),
            tuple(chooser.expovariate(1 / sizes.think_s) for _ in range(sizes.num_turns - 1)),
        )
        for number in which
    ]


def _words(chooser: random.Random, count: int) -> str:
    return " ".join(chooser.choices(_WORDS, k=count))
