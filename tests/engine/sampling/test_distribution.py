"""The distribution of draws over many seeds, against the definition, for each combination of parameters."""

from collections import Counter
from itertools import product

import pytest
import torch
from engine.sampling.plain import draw_many, penalized, probabilities, sample, uniform

from kvblocks import Sequence
from kvblocks.engine.sampling.batch_sampler import BatchSampler
from kvblocks.engine.sampling.params import SamplingParams
from kvblocks.engine.sampling.sampler import Draw, TokenCounts

NUM_DRAWS = 3000
SMALL, LARGE = 60, 5003  # of the large one the most likely are found through groups

COMBINATIONS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature, top_k, top_p, min_p in product((0.6, 1.7), (None, 7, 300), (1.0, 0.85), (0.0, 0.03))
]
PENALTIES = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": 0.6, "top_p": 0.9, "min_p": 0.01},
]


def steep_logits(size, seed):
    """A few likely tokens, anywhere, and a long tail; some are masked."""
    generator = torch.Generator().manual_seed(seed)
    logits = -1.5 * torch.arange(1.0, size + 1).log() + torch.randn(size, generator=generator) * 0.5
    logits = logits[torch.randperm(size, generator=generator)]
    logits[torch.randperm(size, generator=generator)[: size // 10]] = -torch.inf
    return logits


def check(tokens, expected):
    """That the tokens are distributed as expected, by chi-square; the rare ones are counted together."""
    counts = Counter(tokens)
    assert counts.keys() <= expected.keys()
    bins, rare, rare_count = [], 0.0, 0
    for token, probability in expected.items():
        if probability * len(tokens) >= 8:
            bins.append((counts[token], probability * len(tokens)))
        else:
            rare, rare_count = rare + probability * len(tokens), rare_count + counts[token]
    if rare > 0:
        bins.append((rare_count, rare))
    if len(bins) < 2:
        return
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in bins)
    assert float(torch.special.gammaincc(torch.tensor((len(bins) - 1) / 2), torch.tensor(statistic / 2))) > 1e-3


@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_tokens_follow_the_definition(size, options):
    logits = steep_logits(size, seed=size)
    tokens = draw_many(logits, NUM_DRAWS, **options)
    check(tokens, probabilities(logits.tolist(), SamplingParams(**options)))


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_follow_the_definition(penalties, temperature):
    params = SamplingParams(temperature=temperature, **penalties)
    prompt, answer = [1, 2, 3, 4, 4, 4, 59], [3, 3, 3, 5, 6, 6, 1, 9, 9]
    logits = steep_logits(SMALL, seed=1)
    logits[logits.isinf()] = -3.0
    logits[[2, 3, 4, 6, 9]] = torch.tensor([1.8, 2.0, 2.1, 1.5, 2.2])  # in prompt, answer or both
    sequence = Sequence("one", prompt)
    sequence.append_tokens(answer)
    seen = TokenCounts(with_prompt=params.repetition_penalty != 1)
    seen.catch_up(sequence)
    before = logits.clone()
    draws = [(Draw(params, seen), uniform(seed, 0)) for seed in range(NUM_DRAWS)]
    tokens = [drawn.token_id for drawn in sample(BatchSampler(), logits.unsqueeze(0), [draws])]
    assert torch.equal(logits, before)
    changed = penalized(logits.tolist(), params, prompt if params.repetition_penalty != 1 else (), answer)
    if temperature:
        check(tokens, probabilities(changed, params))
    else:
        assert set(tokens) == {max(range(SMALL), key=lambda token: changed[token])}


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_one_seeds_tokens_follow_the_definition_too(temperature):
    logits = steep_logits(SMALL, seed=2)
    params = SamplingParams(temperature=temperature)
    draws = [(Draw(params), uniform(7, position)) for position in range(NUM_DRAWS)]
    tokens = [drawn.token_id for drawn in sample(BatchSampler(), logits.unsqueeze(0), [draws])]
    check(tokens, probabilities(logits.tolist(), params))


def test_the_rarest_tokens_are_drawn_as_often_as_they_should_be():
    """A million tokens of a thousandth of a millionth each: half of all draws are of these."""
    logits = torch.full((100_001,), -torch.tensor(100_000.0).log().item())
    logits[50_000] = 0.0
    tokens = draw_many(logits, 2000, temperature=1.0)
    assert 900 < tokens.count(50_000) < 1100
    others = torch.tensor([token for token in tokens if token != 50_000], dtype=torch.float64)
    assert abs(float(others.mean()) / 50_000 - 1) < 0.06
    assert len(set(others.tolist())) > 900
