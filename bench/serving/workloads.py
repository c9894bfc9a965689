"""What clients ask in bench.serving: when each conversation begins, and what it says in each turn."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvblocks.engine.demo.script import HANDBOOK

Encode = Callable[[str], list[int]]

_WORDS = HANDBOOK.split()


@dataclass(frozen=True)
class Conversation:
    """A client. At `start_s` it sends a prompt of tokens, or a chat's first turn, and each next turn after an answer.

    system: the chat's system prompt. turns: what its user says; empty for a prompt of tokens.
    """

    start_s: float
    prompt: tuple[int, ...] = ()
    system: str = ""
    turns: tuple[str, ...] = ()
    max_tokens: int = 16


@dataclass(frozen=True)
class Workload:
    """Concurrent conversations. shares: whether a cache has anything to find.

    num_blocks: the size of the servers' pool; None: the run's usual one.
    """

    name: str
    about: str
    conversations: tuple[Conversation, ...]
    shares: bool = True
    num_blocks: int | None = None


@dataclass(frozen=True)
class Sizes:
    """The sizes of the workloads. rate: conversations that begin per second.

    A part of a field's name says which workload it belongs to. chats, turns: `multi_turn`. alone: `no_sharing`. mixed:
    `mixed_lengths`. pressed: `pool_pressure`. documents, questions: `long_prompts`. full_rate: `full_rate`, whose
    requests come equally often on every machine. The others belong to `shared_prefix`; most workloads also use its rate
    and max_tokens.
    """

    num_requests: int = 32
    num_shared_tokens: int = 1024
    own_tokens: tuple[int, int] = (32, 128)
    max_tokens: int = 16
    rate: float = 8.0
    num_chats: int = 4
    num_turns: int = 4
    num_alone: int = 8
    num_alone_tokens: int = 384
    num_mixed: int = 12
    mixed_shared_tokens: tuple[int, ...] = (64, 256, 512)
    mixed_own_tokens: tuple[int, int] = (16, 256)
    mixed_max_tokens: tuple[int, int] = (4, 32)
    num_pressed: int = 12
    num_pressed_shared_tokens: int = 64
    num_pressed_own_tokens: int = 64
    pressed_max_tokens: int = 48
    num_pressed_blocks: int = 36
    num_documents: int = 2
    num_document_tokens: int = 2048
    num_questions: int = 3
    question_tokens: tuple[int, int] = (16, 48)
    num_full_rate: int = 48
    full_rate: float = 8.0
    seed: int = 0


QUICK = Sizes(
    num_requests=6,
    num_shared_tokens=64,
    own_tokens=(8, 24),
    max_tokens=4,
    rate=20.0,
    num_chats=2,
    num_turns=2,
    num_alone=3,
    num_alone_tokens=64,
    num_mixed=6,
    mixed_shared_tokens=(16, 48),
    mixed_own_tokens=(4, 40),
    mixed_max_tokens=(2, 6),
    num_pressed=6,
    num_pressed_shared_tokens=16,
    num_pressed_own_tokens=30,
    pressed_max_tokens=24,
    num_pressed_blocks=10,
    num_documents=2,
    num_document_tokens=640,
    num_questions=2,
    question_tokens=(4, 12),
    num_full_rate=4,
    full_rate=20.0,
)
GPU = Sizes(
    num_requests=256,
    max_tokens=128,
    num_chats=32,
    num_turns=6,
    num_alone=64,
    num_alone_tokens=1024,
    num_mixed=128,
    mixed_shared_tokens=(256, 1024, 4096),
    mixed_own_tokens=(32, 2048),
    mixed_max_tokens=(16, 256),
    num_pressed=64,
    num_pressed_shared_tokens=512,
    num_pressed_own_tokens=512,
    pressed_max_tokens=256,
    num_pressed_blocks=1024,
    num_documents=4,
    num_document_tokens=16384,
    num_questions=6,
    question_tokens=(32, 128),
)
"""Half a minute of requests per workload at 8 per second. The context is 16,640 tokens."""


def make_workloads(sizes: Sizes, encode: Encode) -> list[Workload]:
    """Return the seven workloads, the same for the same sizes and tokenizer."""
    return [
        shared_prefix(sizes, encode),
        full_rate(sizes, encode),
        multi_turn(sizes),
        mixed_lengths(sizes, encode),
        long_prompts(sizes, encode),
        pool_pressure(sizes, encode),
        no_sharing(sizes, encode),
    ]


def shared_prefix(sizes: Sizes, encode: Encode, name: str = "shared prefix") -> Workload:
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
    return Workload(name, about, conversations)


def full_rate(sizes: Sizes, encode: Encode) -> Workload:
    """The same, at a rate that is not slowed down for a CPU."""
    return shared_prefix(replace(sizes, num_requests=sizes.num_full_rate, rate=sizes.full_rate), encode, "full rate")


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


def mixed_lengths(sizes: Sizes, encode: Encode) -> Workload:
    """Requests that begin with one of several texts; short requests are as frequent as long ones."""
    chooser = random.Random(sizes.seed + 3)
    kinds = [_tokens(chooser, encode, num_tokens) for num_tokens in sizes.mixed_shared_tokens]
    low, high = sizes.mixed_own_tokens
    conversations = tuple(
        Conversation(
            number / sizes.rate,
            (*chooser.choice(kinds), *_tokens(chooser, encode, round(low * (high / low) ** chooser.random()))),
            max_tokens=chooser.randint(*sizes.mixed_max_tokens),
        )
        for number in range(sizes.num_mixed)
    )
    *some, last = map(str, sizes.mixed_shared_tokens)
    fewest, most = sizes.mixed_max_tokens
    about = (
        f"{sizes.num_mixed} requests that begin with {', '.join(some)} or {last} shared tokens, then {low} to {high}"
        f" own ones, {fewest} to {most} generated, {sizes.rate:g} a second"
    )
    return Workload("mixed lengths", about, conversations)


def long_prompts(sizes: Sizes, encode: Encode) -> Workload:
    """Questions about long documents: every document once, then every document again, and so on."""
    chooser = random.Random(sizes.seed + 4)
    documents = [_tokens(chooser, encode, sizes.num_document_tokens) for _ in range(sizes.num_documents)]
    num_requests = sizes.num_documents * sizes.num_questions
    conversations = tuple(
        Conversation(
            number / sizes.rate,
            (
                *documents[number % sizes.num_documents],
                *_tokens(chooser, encode, chooser.randint(*sizes.question_tokens)),
            ),
            max_tokens=sizes.max_tokens,
        )
        for number in range(num_requests)
    )
    about = (
        f"{num_requests} requests, {sizes.num_questions} about each of {sizes.num_documents} documents of"
        f" {sizes.num_document_tokens} tokens, {sizes.rate:g} a second"
    )
    return Workload("long prompts", about, conversations)


def pool_pressure(sizes: Sizes, encode: Encode) -> Workload:
    """Requests that come at once, to servers whose pool is too small for all of them as they grow."""
    chooser = random.Random(sizes.seed + 5)
    shared = _tokens(chooser, encode, sizes.num_pressed_shared_tokens)
    conversations = tuple(
        Conversation(
            0.0,
            (*shared, *_tokens(chooser, encode, sizes.num_pressed_own_tokens)),
            max_tokens=sizes.pressed_max_tokens,
        )
        for _ in range(sizes.num_pressed)
    )
    about = (
        f"{sizes.num_pressed} requests at once, of {sizes.num_pressed_shared_tokens} shared and"
        f" {sizes.num_pressed_own_tokens} own tokens, {sizes.pressed_max_tokens} generated, with"
        f" {sizes.num_pressed_blocks} blocks"
    )
    return Workload("pool pressure", about, conversations, num_blocks=sizes.num_pressed_blocks)


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
    """Return the sizes with arrivals `scale` times less frequent."""
    return replace(sizes, rate=sizes.rate / scale)


def _tokens(chooser: random.Random, encode: Encode, num_tokens: int) -> list[int]:
    """Return words in random order, as exactly `num_tokens` tokens."""
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += encode(" " + " ".join(chooser.choices(_WORDS, k=num_tokens)))
    return tokens[:num_tokens]
