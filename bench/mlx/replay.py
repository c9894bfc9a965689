"""mlx-lm's prompt cache and ours on a trace of agents: tokens computed a request, by users and memory.

    .venv-mlx/bin/python -m bench.mlx.replay TRACE [--users 1 2 4] [--gb 16 32 64] [--requests N] [--json FILE]

TRACE: sessions with block ids, as `kvblocks replay` reads them (docs/replay.md); blocks stand for tokens. Each user has
sessions one after another; users take turns by the times of the trace. A request keeps what mlx-lm's server keeps: the
end of its prompt if a user wrote the last message (it follows an end of turn), and the end of its answer. The answer's
blocks are those that the session's next prompt has there, if it continues the answer. A model with recurrent states can
only continue from such ends.

mlx-lm's is the real `LRUPromptCache`, with objects that have the bytes of a prompt cache of this length and can't be
trimmed; once with its default of 10 prompts, and once with memory as the only bound. Ours is the `PrefixCache` that
`BlockPromptCache` uses, with the same calls: blocks of KV, and states as payloads. GB are 10**9 bytes.

What it doesn't show: time, tails shorter than a block, and the KV of running requests.
"""

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.conditions import conditions, keep, print_conditions
from bench.environments import needs
from kvblocks import PrefixCache


class Sizes(NamedTuple):
    """Bytes of the KV of a token, and of all states of a sequence."""

    token_bytes: int
    state_bytes: int


MODELS = {
    # 16 layers of 4 KV heads of 256 in bf16; 48 gated delta nets: 48 heads of 128 by 128 in float32, and a convolution
    "qwen3.6-27b": Sizes(16 * 2 * 4 * 256 * 2, 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)),
}
BLOCK = 64


@dataclass
class Request:
    """ids: the ids of the prompt's blocks. end: those with the answer's.

    is_turn: whether a user wrote the last message.
    """

    time: float
    num_tokens: int
    ids: list[int]
    end: list[int]
    is_turn: bool


class Entry:
    """Stands for a prompt cache: bytes that can't be trimmed."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def is_trimmable(self) -> bool:
        """As a prompt cache with recurrent states."""
        return False


def sessions(path: Path, first: int) -> Iterator[list[Request]]:
    """Yield sessions from number `first` on, with ids that are different in each."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        number, rows = -1, []
        for line in [*map(json.loads, file), {"session": None}]:
            if "session" not in line:
                rows.append(line)
                continue
            if rows and number >= first:
                yield read(rows, (number + 1) << 20)
            number, rows = number + 1, []


def read(rows: list[dict[str, Any]], base: int) -> list[Request]:
    """Return the requests of a session. Blocks of answers that no prompt has get ids of their own."""
    requests: list[Request] = []
    ids: list[int] = []
    fresh = base + (1 << 19)
    for number, row in enumerate(rows):
        ids = ids[: row["p"]] + [base + start + i for start, count in row["h"] for i in range(count)]
        is_turn = number == 0 or rows[number - 1]["s"] != "tool_use"
        requests.append(Request(row["t"], row["in"], ids[: row["in"] // BLOCK], [], is_turn))
        requests[-1].end = [row["in"] + row["out"]]
    for number, request in enumerate(requests):
        length = request.end[0] // BLOCK
        following = requests[number + 1].ids if number + 1 < len(requests) else []
        if following[: len(request.ids)] == request.ids and len(following) >= length:
            request.end = following[:length]
        else:
            request.end = request.ids + list(range(fresh, fresh + length - len(request.ids)))
            fresh += length
    return requests


def interleave(path: Path, users: int, first: int, most: int) -> list[Request]:
    """Return the requests of some users in the order of time; each begins its next session when one is over."""
    clocks = defaultdict(float)
    found: list[tuple[float, int, Request]] = []
    for number, session in enumerate(sessions(path, first)):
        user = number % users
        begin = clocks[user] - session[0].time
        found += [(begin + request.time, user, request) for request in session]
        clocks[user] = begin + session[-1].time + 60
        if len(found) > 3 * most * users:
            break
    found.sort(key=lambda item: item[:2])
    return [request for _, _, request in found[:most]]


class Theirs:
    """mlx-lm's own cache. max_size: the most prompts."""

    def __init__(self, sizes: Sizes, max_bytes: int, max_size: int) -> None:
        with needs("mlx"):
            from mlx_lm.models.cache import LRUPromptCache
        self.sizes, self.cache = sizes, LRUPromptCache(max_size=max_size, max_bytes=max_bytes)

    def num_found(self, ids: list[int]) -> int:
        """Return how many of the blocks needn't be computed."""
        found, rest = self.cache.fetch_nearest_cache("m", ids)
        return 0 if found is None else len(ids) - len(rest)

    def insert(self, ids: list[int], kind: str) -> None:
        """Keep a prompt that ends here."""
        number = len(ids) * BLOCK * self.sizes.token_bytes + self.sizes.state_bytes
        if number <= self.cache.max_bytes:  # otherwise it evicts everything, and then itself
            self.cache.insert_cache("m", ids, [Entry(number)], cache_type=kind)


class Ours:
    """The index of `BlockPromptCache`; a block id stands for a token."""

    def __init__(self, sizes: Sizes, max_bytes: int) -> None:
        self.sizes, self.index = sizes, PrefixCache(2**40, 1, max_bytes=max_bytes)
        self.next_id = 0

    def num_found(self, ids: list[int]) -> int:
        """Return how many of the blocks needn't be computed."""
        return self.index.match_prefix(ids).last_payload[0]

    def insert(self, ids: list[int], kind: str) -> None:
        """Keep a prompt that ends here."""
        known = self.index.query_match_len(ids)
        new = range(self.next_id, self.next_id + len(ids) - known)
        self.next_id += len(new)
        self.index.insert_prefix(
            ids,
            new,
            num_cached_tokens=known,
            block_bytes=BLOCK * self.sizes.token_bytes,
            payloads=[(len(ids), kind, self.sizes.state_bytes)],
        )


def run(cache: Theirs | Ours, requests: list[Request]) -> float:
    """Return the mean number of tokens that a request computes."""
    computed = 0
    for request in requests:
        computed += request.num_tokens - BLOCK * cache.num_found(list(request.ids))
        if request.is_turn:
            cache.insert(list(request.ids), "user")
        cache.insert(list(request.end), "assistant")
    return computed / len(requests)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.mlx.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", choices=MODELS, default="qwen3.6-27b")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--gb", type=float, nargs="+", default=[16.0, 32.0, 64.0])
    parser.add_argument("--first", type=int, default=200, help="number of the first session to replay")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sizes = MODELS[given.model]
    facts = conditions(trace=given.trace.name, model=given.model, requests=given.requests, **sizes._asdict())
    facts = {key: value for key, value in facts.items() if key not in ("num_blocks", "block_size", "collector")}
    print_conditions(facts)
    print("users    GB   prompt   mlx-lm   mlx-lm, any number   kvblocks   (tokens a request)")
    rows = []
    for users in given.users:
        requests = interleave(given.trace, users, given.first, given.requests)
        prompt = sum([request.num_tokens for request in requests]) / len(requests)
        for gb in given.gb:
            most = int(gb * 10**9)
            contestants = [Theirs(sizes, most, 10), Theirs(sizes, most, 10**6), Ours(sizes, most)]
            means = [run(contestant, requests) for contestant in contestants]
            print(f"{users:5} {gb:5.0f} {prompt:8.0f} {means[0]:8.0f} {means[1]:20.0f} {means[2]:10.0f}", flush=True)
            names = ("mlx-lm", "mlx-lm, any number of prompts", "kvblocks")
            rows.append({"users": users, "gb": gb, "prompt": prompt, **dict(zip(names, means, strict=True))})
    keep(given.json, facts, rows)


if __name__ == "__main__":
    main()
