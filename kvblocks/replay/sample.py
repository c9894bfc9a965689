"""The trace that ships with the project, and its generator. `python -m kvblocks.replay.sample FILE` writes it again.

It is synthetic and made from one seed: agents of four tenants, whose sessions begin within two hours. It proves nothing
about a policy, as only real traces do, but a replay works without any download. It has what makes real traces hard:

- Sessions of a tenant share the system prompt and the tools of their application. Tenants share nothing.
- An agent calls tools. Each call adds the answer and the tool's result to the prompt, after a pause of seconds, or
  rarely of minutes. After the end of a turn a person thinks for minutes.
- A prompt that gets too long is compacted: the next one has the system prompt and a summary, and the rest of the old
  one is never asked for again.
- An agent may wait for a sub-agent: a session of its own, with a shorter system prompt.
- One tenant sends documents that are read once. Such scans evict what others come back for.

Pauses are log-normal, as with real agents: the median is 9 s after a tool call, and 127 s after the end of a turn.
"""

import gzip
import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SAMPLE = Path(__file__).with_name("sample.jsonl.gz")
"""The path of the sample."""
BLOCK_SIZE = 512
SEED = 20
NUM_AGENTS = 320
DURATION_S = 7200.0


@dataclass(frozen=True)
class _App:
    """A tenant's application. Sizes are in tokens.

    weight: its share of the sessions. num_turns, num_calls: mean numbers of turns in a session, and of tool calls in a
    turn. question, result: median sizes of what a person writes and a tool returns. sub_share: share of calls that
    start a sub-agent.
    """

    tenant: str
    weight: float
    system: int
    num_turns: float
    num_calls: float
    question: int
    result: int
    max_tokens: int = 70_000
    sub_share: float = 0.0


APPS = (
    _App("acme", 0.40, system=11_800, num_turns=3.0, num_calls=6.0, question=150, result=700, sub_share=0.02),
    _App("birch", 0.30, system=3_300, num_turns=4.0, num_calls=0.6, question=90, result=900, max_tokens=24_000),
    _App("cedar", 0.15, system=7_700, num_turns=2.0, num_calls=7.0, question=200, result=1_900, sub_share=0.15),
    _App("dune", 0.15, system=1_100, num_turns=1.0, num_calls=0.0, question=24_000, result=0),
)
SUB_SYSTEM = 4_200


@dataclass
class SampleRequest:
    """A request of the trace. Times are in seconds, sizes in tokens; `blocks` are the numbers of its full blocks."""

    tenant: str
    session: str
    start_s: float
    duration_s: float
    think_s: float
    stop_reason: str
    num_input: int
    num_output: int
    blocks: list[int]


class _Draws:
    """Numbers from one seed, equal on every machine and Python: all come from `random()`, whose bits are fixed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def share(self) -> float:
        return self._random()

    def exponential(self, mean: float) -> float:
        return -mean * math.log(1.0 - self._random())

    def lognormal(self, median: float, sigma: float) -> float:
        radius, angle = math.sqrt(-2.0 * math.log(1.0 - self._random())), 2.0 * math.pi * self._random()
        return median * math.exp(sigma * radius * math.cos(angle))

    def count(self, mean: float) -> int:
        """Return a geometric number, at least 1."""
        return 1 if mean <= 1.0 else 1 + int(math.log(1.0 - self._random()) / math.log(1.0 - 1.0 / mean))


class _Names:
    """Gives each block of the trace a number of its own, from 1 on."""

    def __init__(self) -> None:
        self.last = 0

    def grow(self, chain: list[int], num_tokens: int) -> list[int]:
        """Return the chain with new blocks behind it, as many as `num_tokens` tokens fill."""
        num_new = max(0, num_tokens // BLOCK_SIZE - len(chain))
        self.last += num_new
        return chain + list(range(self.last - num_new + 1, self.last + 1))


@dataclass
class _Talk:
    """A session in progress, of an agent or a sub-agent."""

    app: _App
    session: str
    system: list[int]
    now: float
    num_tokens: int
    think_s: float = 0.0
    num_sub_agents: int = 0
    chain: list[int] = field(default_factory=list)


class _Maker:
    """Makes the requests of sessions, one session after another."""

    def __init__(self, draws: _Draws) -> None:
        self._draws = draws
        self._names = _Names()
        self._systems = {app.tenant: self._names.grow([], app.system) for app in APPS}
        self._sub_systems = {app.tenant: self._names.grow([], SUB_SYSTEM) for app in APPS if app.sub_share}

    def session(self, app: _App, name: str, start_s: float) -> Iterator[SampleRequest]:
        """Yield a session's requests in order."""
        draws, system = self._draws, self._systems[app.tenant]
        talk = _Talk(app, name, system, start_s, app.system, chain=system)
        for _ in range(draws.count(app.num_turns)):
            talk.num_tokens += int(draws.lognormal(app.question, 0.7))
            for _ in range(draws.count(app.num_calls + 1.0) - 1):
                yield self._request(talk, "tool_use")
                if draws.share() < app.sub_share:
                    yield from self._sub_agent(talk)
                else:
                    self._pause(talk, min(draws.lognormal(9.0, 1.4), 1800.0))
                talk.num_tokens += int(draws.lognormal(app.result, 1.1))
                self._compact(talk)
            yield self._request(talk, "end_turn")
            self._pause(talk, min(draws.lognormal(127.0, 1.5), 3600.0))

    def _request(self, talk: _Talk, stop_reason: str) -> SampleRequest:
        """Return the next request of a talk, and add the answer to the talk's context."""
        talk.chain = self._names.grow(talk.chain, talk.num_tokens)
        num_output = 1 + int(self._draws.lognormal(180.0 if stop_reason == "tool_use" else 350.0, 0.8))
        duration_s = round(0.4 + num_output / 70.0, 2)
        request = SampleRequest(
            talk.app.tenant,
            talk.session,
            talk.now,
            duration_s,
            talk.think_s,
            stop_reason,
            talk.num_tokens,
            num_output,
            talk.chain,
        )
        talk.now += duration_s
        talk.num_tokens += num_output
        return request

    def _pause(self, talk: _Talk, seconds: float) -> None:
        talk.think_s = round(seconds, 2)
        talk.now += talk.think_s

    def _sub_agent(self, parent: _Talk) -> Iterator[SampleRequest]:
        """Yield the requests of a sub-agent. Its parent goes on when it has ended."""
        draws, system = self._draws, self._sub_systems[parent.app.tenant]
        parent.num_sub_agents += 1
        name = f"{parent.session}/{parent.num_sub_agents}"
        talk = _Talk(parent.app, name, system, parent.now + 0.5, SUB_SYSTEM, chain=system)
        talk.num_tokens += int(draws.lognormal(600.0, 0.5))
        for _ in range(draws.count(4.0) - 1):
            yield self._request(talk, "tool_use")
            self._pause(talk, min(draws.lognormal(6.0, 1.2), 600.0))
            talk.num_tokens += int(draws.lognormal(1500.0, 1.0))
        yield self._request(talk, "end_turn")
        self._pause(parent, talk.now + 0.5 - parent.now)

    def _compact(self, talk: _Talk) -> None:
        """If a prompt is too long, replace what is behind its system prompt by a summary."""
        if talk.num_tokens > talk.app.max_tokens:
            talk.chain = talk.system
            talk.num_tokens = talk.app.system + int(self._draws.lognormal(2500.0, 0.3))


def make_sample() -> list[SampleRequest]:
    """Return the sample's requests by their start. Deterministic; takes less than a second."""
    draws = _Draws(SEED)
    maker, requests, start_s = _Maker(draws), list[SampleRequest](), 0.0
    for number in range(NUM_AGENTS):
        start_s += draws.exponential(DURATION_S / NUM_AGENTS)
        chosen, app = draws.share(), APPS[0]
        for app in APPS:
            chosen -= app.weight
            if chosen < 0.0:
                break
        requests += maker.session(app, f"{app.tenant}-{number:03}", round(start_s, 2))
    return sorted(requests, key=lambda request: request.start_s)


def lines(requests: list[SampleRequest]) -> Iterator[str]:
    """Yield the lines of a trace in the project's own format. Each line names the blocks that no earlier one has."""
    yield json.dumps({"kvblocks_trace": 1, "block_size": BLOCK_SIZE})
    known = set[int]()
    for request in requests:
        num_known = sum(block in known for block in request.blocks)
        known.update(request.blocks)
        row: dict[str, object] = {
            "t": round(request.start_s, 2),
            "a": request.duration_s,
            "think": request.think_s,
            "tenant": request.tenant,
            "session": request.session,
            "stop": request.stop_reason,
            "tokens": request.num_input,
            "output": request.num_output,
        }
        if num_known:
            row["after"] = f"{request.blocks[num_known - 1]:x}"
        row["ids"] = [f"{block:x}" for block in request.blocks[num_known:]]
        yield json.dumps(row, separators=(",", ":"))


def write_sample(path: Path) -> None:
    """Write the sample as gzip, without the time in the gzip header."""
    text = "".join(f"{line}\n" for line in lines(make_sample()))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    write_sample(Path(sys.argv[1]))
