"""How a quota helps fairness: three modest tenants and a greedy one compete for a pool.

    python -m bench.replay.fairness [--json] [--quota N]

The modest tenants hold conversations: each turn's prompt is all that was said before and some new tokens, so nearly all
of it is a hit as long as it stays cached. The greedy one sends long prompts that never come again, as fast as it may;
whatever it caches is of no use to anybody. Each tenant has its own salt. The same seed gives the same history.

What it does not show: time. No model runs, so it says nothing about latency, nor about the greedy tenant's share of the
computing, which only a scheduler can limit. A quota counts the blocks that running sequences own, but doesn't limit
them: with more prompts at once the greedy tenant owns more. And a tenant is a salt: whoever may use many salts has as
many quotas.
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count

from bench.conditions import conditions, print_conditions
from kvblocks import KVCacheManager, Sequence

BLOCK_SIZE = 16
NUM_BLOCKS = 640
QUOTA = 64
NUM_TICKS, WARM_UP_TICKS = 1500, 100
STEP_TOKENS = 8  # decoded by each running request in a tick
MODEST, GREEDY = ("ann", "bob", "eve"), "greedy"
NUM_SESSIONS, NUM_TURNS, THINKING_TICKS = 4, 8, (4, 12)
SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 128, 48, 32
GREEDY_TOKENS, GREEDY_ANSWER_TOKENS, GREEDY_REQUESTS = 1024, 16, 2


@dataclass(frozen=True)
class Outcome:
    """The results of a scenario after its warm-up.

    hit_rate, hit_rates: of the modest tenants, together and each, by tokens. num_lost_blocks: how many of their cached
    blocks were evicted. num_greedy_requests: how many the greedy tenant finished. max_greedy_blocks: the most blocks
    that it had cached at any time. max_at_loss: the most that it had cached when a modest tenant lost a block.
    max_over_bound: the most that this was above the bound, which is the quota or what the greedy tenant's running
    sequences owned, whichever is more. Both are None if no modest tenant lost a block.
    """

    scenario: str
    hit_rate: float
    hit_rates: dict[str, float]
    num_lost_blocks: int
    num_greedy_requests: int
    max_greedy_blocks: int
    max_at_loss: int | None
    max_over_bound: int | None


@dataclass
class Session:
    """A conversation, or a stream of prompts that don't repeat. wait_ticks: until the next turn."""

    salt: str
    tokens: list[int]
    wait_ticks: int
    num_turns: int = 0
    running: Sequence | None = None
    num_to_decode: int = 0


@dataclass
class Tally:
    """What a tenant has done since the warm-up."""

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_finished: int = 0
    num_lost_blocks: int = 0


@dataclass
class Simulation:
    """One manager and its tenants. quota: the greedy tenant's, in blocks, or None."""

    tenants: tuple[str, ...]
    quota: int | None
    seed: int = 0
    tallies: dict[str, Tally] = field(default_factory=dict)
    max_greedy_blocks: int = 0
    max_at_loss: int | None = None
    max_over_bound: int | None = None

    def __post_init__(self) -> None:
        self.manager = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)
        for salt in self.tenants:  # a quota as large as the pool limits nothing; it makes the manager count
            self.manager.quotas.set(salt, self.quota if salt == GREEDY and self.quota is not None else NUM_BLOCKS)
        self._random = random.Random(self.seed)
        self._tokens = count()
        self._names = count()
        self._systems = {salt: self._fresh(SYSTEM_TOKENS) for salt in MODEST}
        self.sessions = list(self._make_sessions())
        self._cached = dict.fromkeys(self.tenants, 0)

    def run(self) -> None:
        """Let all ticks pass."""
        for tick in range(NUM_TICKS):
            if tick == WARM_UP_TICKS:
                self.tallies = {}
                self.max_greedy_blocks, self.max_at_loss, self.max_over_bound = 0, None, None
            self.tick()

    def tick(self) -> None:
        """Let a tick pass."""
        for session in self.sessions:
            if session.running is None:
                self._start(session)
            else:
                self._continue(session, session.running)

    def tally(self, salt: str) -> Tally:
        """Return what a tenant has done."""
        return self.tallies.setdefault(salt, Tally())

    def _make_sessions(self) -> Iterator[Session]:
        for salt in self.tenants:
            for _ in range(GREEDY_REQUESTS if salt == GREEDY else NUM_SESSIONS):
                first = self._random.randint(0, THINKING_TICKS[1])
                yield Session(salt, [], first, num_turns=self._random.randrange(NUM_TURNS))

    def _fresh(self, num_tokens: int) -> list[int]:
        return [next(self._tokens) for _ in range(num_tokens)]

    def _start(self, session: Session) -> None:
        if session.wait_ticks > 0:
            session.wait_ticks -= 1
            return
        if not session.num_to_decode:  # otherwise the pool had no room for this turn, and it is tried again
            self._say(session)
        sequence = Sequence(next(self._names), session.tokens, salt=session.salt)
        hit = self.manager.get_computed_blocks(sequence)
        held = self._held_by_greedy()
        if self.manager.allocate_slots(sequence, hit=hit) is None:
            return
        self._note(session.salt, sequence.num_tokens // BLOCK_SIZE - len(hit.blocks), held)
        session.running = sequence
        tally = self.tally(session.salt)
        tally.num_queried_tokens += sequence.num_tokens
        tally.num_hit_tokens += hit.num_tokens

    def _say(self, session: Session) -> None:
        if session.salt == GREEDY:
            session.tokens, session.num_to_decode = self._fresh(GREEDY_TOKENS), GREEDY_ANSWER_TOKENS
            return
        if session.num_turns == NUM_TURNS or not session.tokens:
            session.tokens, session.num_turns = list(self._systems[session.salt]), session.num_turns % NUM_TURNS
        session.tokens = session.tokens + self._fresh(TURN_TOKENS)
        session.num_turns += 1
        session.num_to_decode = ANSWER_TOKENS

    def _continue(self, session: Session, sequence: Sequence) -> None:
        num_full, held = sequence.num_tokens // BLOCK_SIZE, self._held_by_greedy()
        if self.manager.append_slots(sequence, self._fresh(STEP_TOKENS)) is None:
            return
        self._note(session.salt, sequence.num_tokens // BLOCK_SIZE - num_full, held)
        session.num_to_decode -= STEP_TOKENS
        if session.num_to_decode > 0:
            return
        session.tokens, session.running = sequence.token_ids(), None
        session.wait_ticks = 0 if session.salt == GREEDY else self._random.randint(*THINKING_TICKS)
        self.manager.free(sequence)
        self.tally(session.salt).num_finished += 1

    def _held_by_greedy(self) -> int:
        """Count the cached blocks that the greedy tenant's running sequences own. They share none."""
        running = [session.running for session in self.sessions if session.salt == GREEDY]
        return sum(sequence.num_tokens // BLOCK_SIZE for sequence in running if sequence is not None)

    def _note(self, caller: str, num_added: int, num_held: int) -> None:
        """Note who lost cached blocks in a call of `caller`, which cached `num_added`.

        A call evicts blocks first and caches `num_added` in them afterwards. So those count as not yet cached when
        others lose theirs. num_held: blocks that the greedy tenant's sequences owned before the call.
        """
        before = self._cached
        counts = {quota.salt: quota.num_cached_blocks for quota in self.manager.quotas}
        self._cached = {salt: counts.get(salt, 0) for salt in self.tenants}
        lost = {salt: before[salt] + num_added * (salt == caller) - self._cached[salt] for salt in self.tenants}
        for salt in self.tenants:
            self.tally(salt).num_lost_blocks += lost[salt]
        if GREEDY not in self.tenants:
            return
        self.max_greedy_blocks = max(self.max_greedy_blocks, self._cached[GREEDY])
        if any(lost[salt] for salt in self.tenants if salt != GREEDY):
            num_cached = self._cached[GREEDY] - num_added * (caller == GREEDY)
            bound = max(NUM_BLOCKS if self.quota is None else self.quota, num_held)
            self.max_at_loss = max(self.max_at_loss or 0, num_cached)
            over = num_cached - bound
            self.max_over_bound = over if self.max_over_bound is None else max(self.max_over_bound, over)


def simulate(scenario: str, tenants: tuple[str, ...], quota: int | None, seed: int = 0) -> Outcome:
    """Run a scenario."""
    simulation = Simulation(tenants, quota, seed)
    simulation.run()
    simulation.manager.check()
    modest = {salt: simulation.tally(salt) for salt in MODEST if salt in tenants}
    num_queried = sum(tally.num_queried_tokens for tally in modest.values())
    return Outcome(
        scenario=scenario,
        hit_rate=sum(tally.num_hit_tokens for tally in modest.values()) / max(num_queried, 1),
        hit_rates={salt: tally.num_hit_tokens / tally.num_queried_tokens for salt, tally in modest.items()},
        num_lost_blocks=sum(tally.num_lost_blocks for tally in modest.values()),
        num_greedy_requests=simulation.tally(GREEDY).num_finished,
        max_greedy_blocks=simulation.max_greedy_blocks,
        max_at_loss=simulation.max_at_loss,
        max_over_bound=simulation.max_over_bound,
    )


def simulate_all(quota: int = QUOTA, seed: int = 0) -> list[Outcome]:
    """Run the four scenarios."""
    return [
        simulate("the modest alone", MODEST, None, seed),
        simulate("and the greedy one", (*MODEST, GREEDY), None, seed),
        simulate("and it has a quota", (*MODEST, GREEDY), quota, seed),
        simulate("it alone, with the quota", (GREEDY,), quota, seed),
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.replay.fairness", description="What a quota does for fairness.")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    parser.add_argument("--quota", type=int, default=QUOTA, help=f"blocks of the greedy tenant (default {QUOTA})")
    given = parser.parse_args(arguments)
    facts = conditions(num_blocks=NUM_BLOCKS, quota=given.quota, num_ticks=NUM_TICKS, warm_up_ticks=WARM_UP_TICKS)
    print_conditions(facts, quiet=given.json)
    outcomes = simulate_all(given.quota)
    if given.json:
        print(json.dumps({"conditions": facts, "results": [asdict(outcome) for outcome in outcomes]}, indent=1))
        return
    print(f"{'':<26}{'modest tenants':^24}{'greedy tenant':^36}")
    print(f"{'':<26}{'hit rate':>12}{'blocks lost':>12}{'requests':>12}{'most cached':>12}{'at a loss':>12}")
    for outcome in outcomes:
        rate = f"{outcome.hit_rate:.1%}" if outcome.hit_rates else "-"
        at_loss = "-" if outcome.max_at_loss is None else outcome.max_at_loss
        numbers = f"{rate:>12}{outcome.num_lost_blocks:>12}{outcome.num_greedy_requests:>12}"
        print(f"{outcome.scenario:<26}{numbers}{outcome.max_greedy_blocks:>12}{at_loss:>12}")
    print("most cached, at a loss: blocks of the greedy tenant's, ever, and when a modest one lost some of its own")


if __name__ == "__main__":
    main()
