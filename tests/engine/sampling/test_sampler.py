"""What a request may ask of sampling, and its own side of it: seeds, positions, and the tokens it has had."""

from collections import Counter

import pytest
from engine.small_models import EVEN, random_tokens

from kvblocks import Sequence
from kvblocks.engine.options import GenerationOptions
from kvblocks.engine.sampling.params import SamplingParams
from kvblocks.engine.sampling.random_numbers import sample_seed
from kvblocks.engine.sampling.sampler import Sampler, TokenCounts, make_samplers
from kvblocks.errors import InvalidArgumentError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0}, "top_p: expected a number above 0.0 and up to 1.0, got 0"),
        ({"top_p": 1.01}, "top_p: .* got 1.01"),
        ({"top_p": NAN}, "top_p: .* got nan"),
        ({"top_p": "0.5"}, "top_p: .* got '0.5'"),
        ({"top_p": True}, "top_p: .* got True"),
        ({"top_k": 0}, "top_k: expected an int of at least 1, got 0"),
        ({"top_k": 1.5}, "top_k: .* got 1.5"),
        ({"temperature": True}, "temperature: expected a number of at least 0, got True"),
        ({"temperature": -0.1}, "temperature: .* got -0.1"),
        ({"temperature": INF}, "temperature: .* got inf"),
        ({"temperature": 10**400}, "temperature: .* got 1000"),
        ({"min_p": -0.1}, "min_p: expected a number from 0.0 to 1.0, got -0.1"),
        ({"min_p": 1.1}, "min_p: .* got 1.1"),
        ({"min_p": None}, "min_p: .* got None"),
        ({"presence_penalty": NAN}, "presence_penalty: expected a finite number, got nan"),
        ({"presence_penalty": "1"}, "presence_penalty: .* got '1'"),
        ({"frequency_penalty": -INF}, "frequency_penalty: expected a finite number, got -inf"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a number above 0.0, got 0"),
        ({"repetition_penalty": INF}, "repetition_penalty: .* got inf"),
        ({"logprobs": -1}, "logprobs: expected an int from 0 to 1000, got -1"),
        ({"logprobs": 1001}, "logprobs: .* got 1001"),
        ({"logprobs": True}, "logprobs: .* got True"),
    ],
)
def test_bad_numbers_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        SamplingParams(**options)
    with pytest.raises(InvalidArgumentError, match=message):
        GenerationOptions(**options).sampling  # noqa: B018


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "1", True])
def test_bad_seeds_are_refused(seed):
    with pytest.raises(InvalidArgumentError, match="seed: expected None or an int from 0 to"):
        Sampler(SamplingParams(), seed)


def test_options_say_what_params_say():
    asked = {"temperature": 0.5, "top_p": 0.4, "top_k": 3, "min_p": 0.2, "logprobs": 2}
    asked |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.1}
    assert GenerationOptions(**asked).sampling == SamplingParams(**asked)
    assert set(asked) == set(SamplingParams.__slots__)
    assert GenerationOptions().sampling == SamplingParams()


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "presence_penalty": 0.5}])
def test_an_answers_draws_are_one_object_until_something_changes(options):
    sampler, sequence = Sampler(SamplingParams(**options), seed=5), Sequence("one", [1, 2, 3])
    assert sampler.random_seed == (5 if options else None)
    sampler.ban([4], 1)
    banned = sampler.next_draw(sequence, 0)
    assert (banned.params, banned.banned) == (sampler.params, (4,))
    assert sampler.next_draw(sequence, 0) is banned
    sequence.append_tokens([7])
    free = sampler.next_draw(sequence, 1)
    assert free == banned._replace(banned=())
    sequence.append_tokens([7])
    assert sampler.next_draw(sequence, 2) is free
    sampler.bias = ((9, 1.0),)
    assert sampler.next_draw(sequence, 2) == free._replace(bias=sampler.bias)


def test_samples_have_seeds_of_their_own():
    params = SamplingParams(temperature=1.0)
    assert [sampler.seed for sampler in make_samplers(params, 9, 3)] == [9, sample_seed(9, 1), sample_seed(9, 2)]
    assert len({sampler.seed for sampler in make_samplers(params, None, 20)}) == 20


@pytest.mark.parametrize("with_prompt", [True, False])
def test_tokens_are_counted_as_they_come(with_prompt):
    prompt, answer = [5, 6, 5, 7], random_tokens(EVEN, 200, seed=1)
    sequence, seen = Sequence("one", prompt), TokenCounts(with_prompt=with_prompt)
    for step in range(0, 200, 7):
        seen.catch_up(sequence)
        seen.catch_up(sequence)
        expected = Counter(answer[:step])
        if with_prompt:
            expected.update(dict.fromkeys(prompt, 0))
        assert dict(zip(seen.tokens, seen.counts, strict=True)) == dict(expected)
        sequence.append_tokens(answer[step : step + 7])  # the last time fewer


@pytest.mark.parametrize("number", range(6))
def test_an_interrupt_while_tokens_are_counted_loses_none(number):
    sequence, seen = Sequence("one", [5, 6, 7]), TokenCounts(with_prompt=True)
    seen.catch_up(sequence)
    sequence.append_tokens([6, 8, 8, 9, 6])
    rest = sequence.token_ids(3)

    class Interrupted:
        num_prompt_tokens, num_tokens = 3, 8

        def token_ids(self, start):
            yield from rest[:number]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        seen.catch_up(Interrupted())
    seen.catch_up(sequence)
    assert dict(zip(seen.tokens, seen.counts, strict=True)) == {5: 0, 6: 2, 7: 0, 8: 2, 9: 1}


def test_neutral_penalties_look_at_no_tokens():
    assert Sampler(SamplingParams(temperature=1.0), seed=5).next_draw(Sequence("one", [1]), 0).seen is None
