"""One launch draws the tokens that plain torch draws, whatever is asked for and however long the list of likely is."""

import random

import numpy as np
import pytest
import torch
from engine.sampling.plain import sample, uniform

from kvblocks import Sequence
from kvblocks.engine.errors import BrokenLogitsError
from kvblocks.engine.sampling import weights
from kvblocks.engine.sampling.batch_sampler import BatchSampler
from kvblocks.engine.sampling.params import SamplingParams
from kvblocks.engine.sampling.sampler import GREEDY, Draw, TokenCounts
from kvblocks.kernels import draw
from kvblocks.kernels.draw import NUM_PARAMETERS, draw_tokens
from kvblocks.kernels.launching import INTERPRETED
from kvblocks.kernels.layout import KernelArgumentError

SIZE = 300
LISTS = {"a list": (32, 200), "a list of one": (1, 200), "no room for a list": (32, 0)}
LAST = 1 - 2.0**-53
PLAIN, LIMITED = {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Tiles so small that a row has several, and the same `exp` for plain torch as in the interpreter: numpy's."""
    monkeypatch.setattr(draw, "TILE", 256)
    choose(monkeypatch, "a list")
    if INTERPRETED:

        def weigh(below, scale, vocab_size, found):
            powers = torch.from_numpy(np.exp(below.mul_(scale).numpy()))
            return found.copy_(powers.mul_(2.0 ** (62 - vocab_size.bit_length())))

        monkeypatch.setattr(weights, "_weigh", weigh)


def choose(monkeypatch, name):
    likely, room = LISTS[name]
    monkeypatch.setattr(draw, "LIKELY", likely)
    monkeypatch.setattr(draw, "MAX_LISTED", max(1, room))


def some_logits(device, num_rows, seed=0, spread=2.0):
    found = torch.randn(num_rows, SIZE, generator=torch.Generator().manual_seed(seed)) * spread
    found[::2] = (found[::2] * 2).round() / 2  # many are equal
    return found.to(device)


def check(logits, draws):
    """Both ways draw the same, and exclude the same as broken."""
    sampler = BatchSampler(draw_tokens)
    got, expected = sample(sampler, logits, draws), sample(BatchSampler(), logits, draws)
    assert [str(outcome) for outcome in got] == [str(outcome) for outcome in expected]
    return got


@pytest.mark.parametrize("name", LISTS)
def test_limits(device, monkeypatch, name):
    choose(monkeypatch, name)
    asked = [
        {"top_p": 0.3},
        {"top_p": 0.999, "temperature": 2.0},
        {"top_k": 1},
        {"top_k": 20, "top_p": 0.9},
        {"top_k": SIZE - 1},
        {"min_p": 0.2, "top_p": 0.9},
        {"min_p": 1.0},
    ]
    asked = asked if name == "a list" else asked[1:6:2]
    logits = some_logits(device, len(asked), spread=1.0)
    chooser = random.Random(name)
    draws = [
        [(Draw(SamplingParams(**({"temperature": 0.8} | options))), uniform(chooser.randrange(99), row))]
        for row, options in enumerate(asked)
    ]
    found = check(logits, draws)
    for row, options in enumerate(asked):
        if options in ({"top_k": 1}, {"min_p": 1.0}):
            assert logits[row, found[row].token_id] == logits[row].max()


def test_no_limit_and_greedy_by_random_numbers_from_first_to_last(device):
    numbers = [0.0, *(uniform(seed, 0) for seed in range(12)), LAST]
    logits = some_logits(device, 2)
    own = [(Draw(GREEDY), 0.0), *((Draw(SamplingParams(**PLAIN)), number) for number in numbers)]
    found = check(logits, [own, own])
    assert len({drawn.token_id for drawn in found}) > 8
    assert found[0].token_id == int(logits[0].argmax())


@pytest.mark.parametrize("number", [0.0, LAST])
def test_the_first_and_the_last_of_what_is_left(device, number):
    check(some_logits(device, 1), [[(Draw(SamplingParams(**LIMITED)), number)]])


def test_changed_logits_and_logarithms_in_one_step(device):
    sequence = Sequence("one", [1, 2, 3])
    sequence.append_tokens([4, 4, 5])
    seen = TokenCounts(with_prompt=True)
    seen.catch_up(sequence)
    logits = some_logits(device, 4, spread=1.0)
    best = int(logits[1].argmax())
    draws = [
        [(Draw(SamplingParams(**LIMITED, presence_penalty=1.0), seen), uniform(1, 0))],
        [(Draw(GREEDY, banned=(best,)), 0.0), ValueError("no token today")],
        [(Draw(SamplingParams(**PLAIN, logprobs=2)), uniform(2, 0)), (Draw(SamplingParams(logprobs=0)), 0.0)],
        [],
    ]
    found = check(logits, draws)
    assert found[1].token_id != best
    assert found[3].logprobs is not None


@pytest.mark.parametrize("options", [{}, PLAIN, LIMITED], ids=["greedy", "plain", "limited"])
def test_odd_rows(device, options):
    logits = some_logits(device, 7)  # -inf, equal ones and NaN among them
    logits[0, 17] = torch.nan
    logits[1, [5, 250]] = torch.inf
    logits[2] = -torch.inf
    logits[3] = torch.nan
    logits[4, :-1] = -torch.inf
    logits[5] = torch.finfo(torch.float32).min
    logits[6] = 1.5
    found = check(logits, [[(Draw(SamplingParams(**options)), 0.7)]] * 7)
    assert [isinstance(outcome, BrokenLogitsError) for outcome in found] == [True, False, False, True, *[False] * 3]
    assert found[1].token_id in (5, 250)
    assert found[4].token_id == SIZE - 1


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("temperature", [1e-308, 1e308])
def test_the_least_and_the_largest_temperature(device, temperature):
    params = [SamplingParams(temperature=temperature), SamplingParams(temperature=temperature, top_p=0.5)]
    check(some_logits(device, 2), [[(Draw(one), 0.6)] for one in params])


@pytest.mark.parametrize("size", [1, 2, 128, 129])
def test_small_vocabularies_and_rows_that_are_apart(device, size):
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(1)).to(device)[:, :size]
    draws = [[(Draw(SamplingParams(**options)), 0.9)] for options in ({}, PLAIN, {"temperature": 1.0, "top_k": 1})]
    check(logits, draws)


def test_a_step_is_one_launch(device):
    """Whatever its draws ask for; those of changed logits are another one."""
    calls = []

    def counted(logits, parameters):
        calls.append(parameters[:, 0].tolist())
        return draw_tokens(logits, parameters)

    sampler = BatchSampler(counted)
    own = [(Draw(SamplingParams(**options)), 0.5) for options in ({}, PLAIN, LIMITED)]
    sample(sampler, some_logits(device, 2), [own, own])
    assert calls == [[0, 0, 0, 1, 1, 1]]
    assert (sampler.counts.num_draws, sampler.counts.num_sorted) == (6, 0)
    sample(sampler, some_logits(device, 2), [[own[0]], [(Draw(GREEDY, banned=(1,)), 0.0)]])
    assert calls[1:] == [[0], [0]]
    assert sample(sampler, some_logits(device, 1), [[]]) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logits, parameters: (logits.half(), parameters), "logits: expected .*float32"),
        (lambda logits, parameters: (logits[0], parameters), "logits: expected .*num_rows, vocab"),
        (lambda logits, parameters: (logits[:, :0], parameters), "logits: expected"),
        (lambda logits, parameters: (logits[:, :1].expand(4, 3), parameters), "rows contiguous"),
        (lambda logits, parameters: (logits, parameters.float()), "parameters: expected .*float64"),
        (lambda logits, parameters: (logits, parameters[:, :5]), "parameters: expected .*num_draws, 6"),
        (lambda logits, parameters: (logits, parameters[:1].T.contiguous().T), None),
        (lambda logits, parameters: (logits, parameters.T.contiguous().T), "parameters: expected .*contiguous"),
    ],
)
def test_what_is_refused(device, change, message):
    """Views are made where they are used, since a move to a device makes most of them contiguous."""
    logits = torch.zeros(4, 4, device=device)
    parameters = torch.zeros(2, NUM_PARAMETERS, dtype=torch.float64, device=device)
    logits, parameters = change(logits, parameters)
    if message is None:
        assert draw_tokens(logits, parameters).tolist() == [[0, 0, 1]]
    else:
        with pytest.raises(KernelArgumentError, match=message):
            draw_tokens(logits, parameters)


def test_no_draws(device):
    assert draw_tokens(torch.zeros(1, 4, device=device), torch.zeros(0, NUM_PARAMETERS).double().to(device)).shape == (
        0,
        3,
    )
