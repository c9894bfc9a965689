"""Random requests, and a mocked model whose answers depend on nothing but the tokens before them.

So two schedulers that are given the same requests see the same tokens, whatever they decide, and equal prompts are
continued alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from zlib import crc32

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from bench.vllm.schedulers import VOCABULARY, Settings, request_hasher

NUM_DOCUMENTS = 12
MOST_OPEN = 20  # the last requests, of which any may be followed up
STEPS_BETWEEN = 3  # at most, from one arrival to the next


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to come. arrival, cancelled: the steps before which it arrives and is cancelled, None for never."""

    request_id: str
    arrival: int
    prompt: tuple[int, ...]
    max_tokens: int
    salt: str | None = None
    priority: int = 0
    cancelled: int | None = None

    def make_request(self, settings: Settings) -> Request:
        """Return a fresh request for vLLM."""
        return Request(
            request_id=self.request_id,
            prompt_token_ids=list(self.prompt),
            sampling_params=SamplingParams(ignore_eos=True, max_tokens=self.max_tokens),
            pooling_params=None,
            arrival_time=float(self.arrival),
            cache_salt=self.salt,
            priority=self.priority,
            block_hasher=request_hasher(settings.block_size, settings.num_ahead) if settings.has_caching else None,
        )


@dataclass(frozen=True, slots=True)
class Mix:
    """What requests are like.

    longest: tokens of the longest prompt that begins a conversation. share_follow_ups: which share of the requests
    goes on with an earlier one and its answer, as in a conversation. The others share the beginning of a document, and
    part from it anywhere.
    """

    longest: int = 600
    most_output: int = 60
    num_salts: int = 0
    share_cancelled: float = 0.0
    num_priorities: int = 1
    share_follow_ups: float = 0.0


def make_asks(mix: Mix, seed: int, num_requests: int) -> list[Ask]:
    """Return requests that share beginnings of a few documents, in order of arrival."""
    random = Random(seed)
    documents = [[random.randrange(VOCABULARY) for _ in range(mix.longest)] for _ in range(NUM_DOCUMENTS)]
    asks: list[Ask] = []
    step = 0
    for number in range(num_requests):
        step += random.choice((0, 0, *range(STEPS_BETWEEN + 1)))
        num_shared = random.randrange(mix.longest * 3 // 4)
        num_own = random.choice((0, 1, random.randrange(1, 40), random.randrange(1, mix.longest // 4)))
        prompt = random.choice(documents)[:num_shared] + [random.randrange(VOCABULARY) for _ in range(num_own)]
        if asks and mix.share_follow_ups and random.random() < mix.share_follow_ups:
            earlier = random.choice(asks[-MOST_OPEN:])
            answer = continuation(earlier.prompt, earlier.max_tokens)
            if len(earlier.prompt) + len(answer) < 2 * mix.longest:
                prompt = [*earlier.prompt, *answer, *prompt[-num_own - 1 :]]
        is_cancelled = random.random() < mix.share_cancelled
        asks.append(
            Ask(
                request_id=f"r{number}",
                arrival=step,
                prompt=tuple(prompt or documents[0][:1]),
                max_tokens=random.randint(1, mix.most_output),
                salt=random.choice([None, *map(str, range(mix.num_salts))]) if mix.num_salts else None,
                priority=random.randrange(mix.num_priorities),
                cancelled=step + random.randrange(1, mix.most_output) if is_cancelled else None,
            )
        )
    return asks


def next_token(tokens: Sequence[int]) -> int:
    """Return what the mocked model answers behind `tokens`."""
    number = len(tokens)
    return crc32(b"%d %d %d" % (tokens[number // 2], tokens[-1], number)) % VOCABULARY


def continuation(tokens: Sequence[int], num_tokens: int) -> list[int]:
    """Return the mocked model's next tokens behind `tokens`."""
    grown = list(tokens)
    for _ in range(num_tokens):
        grown.append(next_token(grown))
    return grown[len(tokens) :]


def make_drafts(tokens: Sequence[int], num_drafts: int) -> list[int]:
    """Return drafts behind `tokens`: the first few are right, the one behind them is wrong."""
    drafts = continuation(tokens, num_drafts)
    num_right = num_accepted(tokens, num_drafts)
    if num_right < num_drafts:
        drafts[num_right] = (drafts[num_right] + 1) % VOCABULARY
    return drafts


def num_accepted(tokens: Sequence[int], num_drafts: int) -> int:
    """Return how many of the drafts behind `tokens` are right."""
    return crc32(b"%d %d" % (tokens[-1], len(tokens))) % (num_drafts + 1)
