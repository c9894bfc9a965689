"""One sampler over many steps: what it keeps of the last step changes no draw."""

import random
from contextlib import suppress

import pytest
import torch
from engine.interrupted_engines import Interrupts
from engine.sampling.plain import sample

from kvblocks import Sequence
from kvblocks.engine.sampling import batch_sampler
from kvblocks.engine.sampling.batch_sampler import BatchSampler
from kvblocks.engine.sampling.params import SamplingParams
from kvblocks.engine.sampling.sampler import Draw, TokenCounts

SIZE = 200
OPTIONS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.01},
    {"temperature": 1.0, "presence_penalty": 0.5},
    {"temperature": 1.0, "logprobs": 2},
]


def seen_of(params):
    seen, sequence = TokenCounts(with_prompt=True), Sequence("one", [1, 2, 3])
    sequence.append_tokens([5, 6])
    seen.catch_up(sequence)
    return seen if params.is_penalized else None


class Kernel:
    """A stand-in for the kernel, whose tokens depend on all that it is told. given, told: parameters, then and now."""

    def __init__(self):
        self.given, self.told = [], []

    def __call__(self, logits, parameters):
        self.given.append(parameters)
        self.told.append(parameters.tolist())
        likeliest = logits[parameters[:, 0].long()].argmax(1)
        token = (likeliest + (parameters[:, 1:].sum(1) * 1000).long()) % logits.shape[1]
        return torch.stack([token.double(), torch.zeros(len(token)), torch.ones(len(token))], 1)


class Asked:
    """A request: its draw, how many draws are made from its row, and whether they fail."""

    def __init__(self, chooser):
        self.draw = Draw(SamplingParams(**chooser.choice(OPTIONS)))
        self.change(params=self.draw.params)
        self.number = chooser.choice([1, 1, 2])
        self.fails = False

    def change(self, **fields):
        changed = self.draw._replace(**fields)
        self.draw = changed._replace(seen=seen_of(changed.params))

    def draws(self, chooser):
        number = 0.0 if self.draw.params.is_greedy else chooser.random()
        return [ValueError("no token today") if self.fails else (self.draw, number)] * self.number


def change(chooser, requests):
    """Change one thing, or nothing."""
    one = chooser.choice(requests)
    match chooser.randrange(8):
        case 0:
            requests.append(Asked(chooser))
        case 1 if len(requests) > 1:
            requests.remove(one)
        case 2:
            chooser.shuffle(requests)
        case 3:
            one.change(params=chooser.choice([requests[0].draw.params, SamplingParams(**chooser.choice(OPTIONS))]))
        case 4:
            one.change(banned=chooser.choice([(), (7, 8)]))
        case 5:
            one.fails = not one.fails
        case 6:
            one.number, requests[0].number = requests[0].number, one.number


@pytest.mark.parametrize("has_kernel", [False, True])
def test_a_sampler_draws_step_after_step_as_a_new_one_does(has_kernel):
    chooser = random.Random(3)
    requests = [Asked(chooser)]
    kernel = Kernel() if has_kernel else None
    sampler = BatchSampler(kernel)
    for _ in range(300):
        if len(requests) > 4:
            requests = requests[:2]
        change(chooser, requests)
        draws = [one.draws(chooser) for one in requests]
        size = chooser.choice([SIZE] * 5 + [SIZE // 2])  # of another model's vocabulary
        logits = torch.randn(len(draws), size, generator=torch.Generator().manual_seed(chooser.randrange(99)))
        fresh = Kernel() if has_kernel else None
        num_told = len(kernel.told) if has_kernel else 0
        got, expected = sample(sampler, logits, draws), sample(BatchSampler(fresh), logits, draws)
        assert [str(outcome) for outcome in got] == [str(outcome) for outcome in expected]
        if has_kernel:
            assert kernel.told[num_told:] == fresh.told
    assert kernel is None or [given.tolist() for given in kernel.given] == kernel.told  # a device may read them late
    sampler.draw_tokens = None  # at any time
    assert str(sample(sampler, logits, draws)) == str(sample(BatchSampler(), logits, draws))


@pytest.mark.parametrize("has_kernel", [False, True])
def test_the_draws_of_the_same_requests_are_grouped_once(monkeypatch, has_kernel):
    calls, group_draws = [], batch_sampler.group_draws
    monkeypatch.setattr(batch_sampler, "group_draws", lambda *given: calls.append(given) or group_draws(*given))
    sampler, params = BatchSampler(Kernel() if has_kernel else None), [SamplingParams(**options) for options in OPTIONS]
    logits = torch.randn(len(params), SIZE, generator=torch.Generator().manual_seed(1))
    draws = [Draw(one, seen_of(one)) for one in params]
    for number in (0.1, 0.5, 0.9):
        sample(sampler, logits, [[(one, number)] for one in draws])
    assert len(calls) == 1
    sample(sampler, logits[:-1], [[(one, 0.5)] for one in draws[:-1]])
    assert len(calls) == 2


def test_an_interrupt_at_any_line_leaves_no_draws_of_another_step():
    """A step has one request, an interrupted one has two, and the next one has the first request again."""
    draws = [(Draw(SamplingParams()), 0.0) for _ in range(2)]
    logits = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(1))
    (expected,) = sample(BatchSampler(), logits[:1], [draws[:1]])
    number, was_interrupted = 0, True
    while was_interrupted:
        number, sampler = number + 1, BatchSampler()
        sample(sampler, logits[:1], [draws[:1]])
        interrupts = Interrupts(number)
        with suppress(KeyboardInterrupt), interrupts.on():
            sample(sampler, logits, [[one] for one in draws])
        was_interrupted = bool(interrupts.places)
        assert sample(sampler, logits[:1], [draws[:1]]) == [expected], interrupts.places
    assert number > 20
