"""Sampling by its definition, one row at a time in plain Python: the oracle of sampling on tensors."""

import math
from collections import Counter

from kvblocks.engine.sampling.batch_sampler import BatchSampler
from kvblocks.engine.sampling.params import SamplingParams
from kvblocks.engine.sampling.random_numbers import uniforms
from kvblocks.engine.sampling.sampler import Draw


def uniform(seed, position):
    """One random number."""
    return uniforms([seed], [position]).item()


def sample(sampler, logits, asked):
    """The outcomes of draws. asked: for each row, the draws with their random numbers, or errors in their place."""
    numbers = [0.0 if isinstance(one, Exception) else one[1] for own in asked for one in own]
    draws = [[one if isinstance(one, Exception) else one[0] for one in own] for own in asked]
    return sampler.sample(logits, draws, numbers)


def penalized(logits, params, prompt=(), answer=()):
    """The logits after penalties."""
    counts, changed = Counter(answer), list(logits)
    for token in {*prompt, *answer}:
        value, penalty = changed[token], params.repetition_penalty
        value = value / penalty if value > 0 else value * penalty
        value -= params.frequency_penalty * counts[token] + params.presence_penalty * (counts[token] > 0)
        changed[token] = value
    return changed


def probabilities(logits, params):
    """The tokens that may be drawn, the most likely one first, with their probabilities."""
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])
    largest = logits[ranked[0]]
    weights = {token: math.exp((logits[token] - largest) / params.temperature) for token in ranked}
    ranked = [token for token in ranked if weights[token] >= params.min_p][: params.top_k]
    total = math.fsum(weights[token] for token in ranked)
    kept, reached = [], 0.0
    for token in ranked:
        if kept and params.top_p < 1 and reached >= params.top_p * total:
            break
        kept.append(token)
        reached += weights[token]
    return {token: weights[token] / reached for token in kept if weights[token]}


def draw(logits, *, seed=0, position=0, sampler=None, **options):
    """The token drawn from one row, alone."""
    asked = Draw(SamplingParams(**options)), uniform(seed, position)
    (outcome,) = sample(sampler or BatchSampler(), logits.unsqueeze(0), [[asked]])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome.token_id


def draw_many(logits, number, *, sampler=None, **options):
    """The tokens drawn from one row with each of `number` seeds."""
    params = SamplingParams(**options)
    draws = [(Draw(params), uniform(seed, 0)) for seed in range(number)]
    return [outcome.token_id for outcome in sample(sampler or BatchSampler(), logits.unsqueeze(0), [draws])]
