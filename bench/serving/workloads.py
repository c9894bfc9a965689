"""What clients ask in bench.serving: when each conversation begins, and what it says in each turn."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvblocks.engine.demo.script import HANDBOOK

Encode = Callable[[str], list[int]]

_WORDS = HANDBOOK.split()


@dataclass(frozen=True)
class Conversation:
    """A client: at `start_s` it sends a prompt of tokens, or the first turn of a chat; the next after each answer.

    system: of a chat. turns: what its user says; empty for a prompt of tokens.
    """

    start_s: float
    prompt: tuple[int, ...] = ()
    system: str = ""
    turns: tuple[str, ...] = ()
    max_tokens: int = 16


@dataclass(frozen=True)
class Workload:
    """Conversations that go on at the same time. shares: whether a cache has anything to find."""

    name: str
    about: str
    conversations: tuple[Conversation, ...]
    shares: bool = True


@dataclass(frozen=True)
class Sizes:
    """How large the workloads are. rate: conversations that begin in a second."""

    num_requests: int = 48
    num_shared_tokens: int = 1024
    own_tokens: tuple[int, int] = (32, 128)
    max_tokens: int = 16
    rate: float = 8.0
    num_chats: int = 4
    num_turns: int = 4
    num_alone: int = 12
    num_alone_tokens: int = 384
    seed: int = 0


QUICK = Sizes(6, 64, (8, 24), 4, 20.0, 2, 2, 3, 64)


def make_workloads(sizes: Sizes, encode: Encode) -> list[Workload]:
    """Return the three workloads, the same for the same sizes and tokenizer."""
    return [shared_prefix(sizes, encode), multi_turn(sizes), no_sharing(sizes, encode)]


def shared_prefix(sizes: Sizes, encode: Encode) -> Workload:
    """Requests that begin alike, arriving at even intervals."""
    chooser = random.Random(sizes.seed)
    shared = _tokens(chooser, encode, sizes.num_shared_tokens)
    conversations = tuple(
        Conversation(
            number / sizes.rate,
            (*shared, *_tokens(chooser, encode, chooser.randint(*sizes.own_tokens))),
            max_tokens=sizes.max_tokens,
        )
        for number in range(sizes.num_requests)
    )
    low, high = sizes.own_tokens
    about = (
        f"{sizes.num_requests} requests of {sizes.num_shared_tokens} shared and {low} to {high} own tokens,"
        f" {sizes.rate:g} a second"
    )
    return Workload("shared prefix", about, conversations)


def multi_turn(sizes: Sizes) -> Workload:
    """Chats, each of which sends all that was said so far again, with every turn."""
    chooser = random.Random(sizes.seed + 1)
    conversations = tuple(
        Conversation(
            number / sizes.rate,
            system=" ".join(chooser.choices(_WORDS, k=60)),
            turns=tuple(" ".join(chooser.choices(_WORDS, k=25)) for _ in range(sizes.num_turns)),
            max_tokens=sizes.max_tokens,
        )
        for number in range(sizes.num_chats)
    )
    about = f"{sizes.num_chats} chats of {sizes.num_turns} turns, {sizes.rate:g} beginning a second, nothing in common"
    return Workload("multi-turn chat", about, conversations)


def no_sharing(sizes: Sizes, encode: Encode) -> Workload:
    """Requests that have nothing in common."""
    chooser = random.Random(sizes.seed + 2)
    conversations = tuple(
        Conversation(
            number / sizes.rate,
            tuple(_tokens(chooser, encode, sizes.num_alone_tokens)),
            max_tokens=sizes.max_tokens,
        )
        for number in range(sizes.num_alone)
    )
    about = f"{sizes.num_alone} requests of {sizes.num_alone_tokens} own tokens, {sizes.rate:g} a second"
    return Workload("no sharing", about, conversations, shares=False)


def slowed(sizes: Sizes, scale: float) -> Sizes:
    """Return the sizes with arrivals `scale` times rarer."""
    return replace(sizes, rate=sizes.rate / scale)


def _tokens(chooser: random.Random, encode: Encode, num_tokens: int) -> list[int]:
    """Just so many tokens of words in random order."""
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += encode(" " + " ".join(chooser.choices(_WORDS, k=num_tokens)))
    return tokens[:num_tokens]
