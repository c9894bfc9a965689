"""Drawing tokens: the distribution that top_k and top_p leave, and rows that can't be drawn from."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvblocks.engine.errors import BrokenLogitsError
from kvblocks.engine.run.sampler import Sampler, make_samplers, sample_step
from kvblocks.errors import InvalidArgumentError

LOGITS = torch.tensor([1.0, -torch.inf, 3.0, 2.0, 0.0])


def kept_tokens(logits, top_p=1.0, top_k=None):
    """By the definition: the most likely ones, k at most, as few as have p of what those have together."""
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])
    ranked = ranked[: top_k or len(ranked)]
    weights = [float(torch.tensor(logits[token], dtype=torch.float64).exp()) for token in ranked]
    kept, total = [], 0.0
    for token, weight in zip(ranked, weights, strict=True):
        if kept and total >= top_p * sum(weights):
            break
        kept.append(token)
        total += weight
    return kept


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"top_k": 1}, {2}),
        ({"top_k": 2}, {2, 3}),
        ({"top_k": 99}, {0, 2, 3, 4}),
        ({"top_p": 0.01}, {2}),
        ({"top_p": 0.64}, {2}),  # 0.644, 0.237, 0.087, 0.032
        ({"top_p": 0.65}, {2, 3}),
        ({"top_p": 0.89}, {0, 2, 3}),
        ({"top_p": 0.999}, {0, 2, 3, 4}),
        ({"top_k": 2, "top_p": 0.72}, {2}),  # of the two, the first has 0.731
        ({"top_k": 2, "top_p": 0.74}, {2, 3}),
    ],
)
def test_only_the_likely_ones_are_drawn_in_their_proportion(options, tokens):
    sampler = Sampler(temperature=1.0, seed=0, **options)
    counts = Counter(sampler.sample(LOGITS) for _ in range(3000))
    assert counts.keys() == tokens
    weights = {token: float(LOGITS[token].exp()) for token in tokens}
    for token in tokens:
        assert abs(counts[token] / 3000 - weights[token] / sum(weights.values())) < 0.03


@given(
    logits=st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12),
    top_k=st.none() | st.integers(1, 14),
    top_p=st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.95, 1.0]),
)
def test_what_is_kept_is_what_the_definition_says(logits, top_k, top_p):
    sampler = Sampler(temperature=1.0, seed=0, top_p=top_p, top_k=top_k)
    drawn = {sampler.sample(torch.tensor(logits)) for _ in range(60)}
    assert drawn <= set(kept_tokens(logits, top_p, top_k))


def test_limits_that_keep_all_change_no_draw():
    plain, limited = (Sampler(temperature=0.7, seed=5, **options) for options in ({}, {"top_k": 5, "top_p": 1.0}))
    assert [plain.sample(LOGITS) for _ in range(50)] == [limited.sample(LOGITS) for _ in range(50)]


def test_equally_likely_ones_are_kept_in_the_order_of_the_vocabulary():
    sampler = Sampler(temperature=1.0, seed=0, top_k=2)
    assert {sampler.sample(torch.zeros(6)) for _ in range(100)} == {0, 1}


def test_greedy_needs_neither():
    assert Sampler(top_p=0.5, top_k=3).sample(LOGITS) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0}, "top_p: expected a number above 0.0 and up to 1.0, got 0"),
        ({"top_p": 1.01}, "top_p: .* got 1.01"),
        ({"top_p": float("nan")}, "top_p: .* got nan"),
        ({"top_p": "0.5"}, "top_p: .* got '0.5'"),
        ({"top_p": True}, "top_p: .* got True"),
        ({"top_k": 0}, "top_k: expected an int of at least 1, got 0"),
        ({"top_k": 1.5}, "top_k: .* got 1.5"),
        ({"temperature": True}, "temperature: .* got True"),
    ],
)
def test_bad_numbers_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Sampler(**options)
    with pytest.raises(InvalidArgumentError, match=message):
        make_samplers(2, **{"temperature": 1.0, "seed": None, **options})


class BadSampler(Sampler):
    def sample(self, logits, best=None):
        raise ValueError("no token today")


def test_a_row_that_cannot_be_drawn_from_keeps_no_other_from_its_token():
    logits = LOGITS.repeat(4, 1)
    logits[1, 3] = torch.nan
    outcomes = sample_step(logits, [[Sampler()], [Sampler(), Sampler()], [Sampler(), BadSampler()], [Sampler()]])
    assert [outcome for outcome in outcomes if not isinstance(outcome, Exception)] == [2, 2, 2]
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [int, BrokenLogitsError, BrokenLogitsError, int, ValueError, int]


@pytest.mark.parametrize("temperature", [1e-300, 1e-307, 1e-308, 5e-324])
def test_the_smallest_temperatures_are_greedy(temperature):
    assert Sampler(temperature, seed=0).sample(torch.tensor([1.0, 30.0, 2.0])) == 1
