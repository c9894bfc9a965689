"""What ends an answer beside its length: stop tokens of the caller, and none of them before min_tokens."""

import pytest

from kvblocks import Sequence
from kvblocks.engine import Engine, LoadedModel
from kvblocks.engine.options import GenerationOptions
from kvblocks.engine.sampling.params import SamplingParams
from kvblocks.engine.sampling.sampler import Sampler
from kvblocks.errors import InvalidArgumentError

GREEDY = {"max_tokens": 20, "ignore_eos": True}
DRAWN = {**GREEDY, "temperature": 1.0, "seed": 4}


@pytest.fixture(scope="module")
def model(tiny_folder):
    return LoadedModel.load(tiny_folder)


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, num_blocks=64)


@pytest.mark.parametrize("options", [GREEDY, DRAWN])
def test_a_stop_token_ends_an_answer_and_is_not_in_its_text(engine, options):
    (free,) = engine.generate(["hello"], **options)
    stop = free.token_ids[7]
    end = free.token_ids.index(stop) + 1
    (stopped,) = engine.generate(["hello"], **options, stop_token_ids=[stop])
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[:end], "stop")
    assert stopped.text == engine.model.tokenizer.decode(free.token_ids[: end - 1])
    (streamed,) = [list(engine.stream(["hello"], **options, stop_token_ids=(stop,)))]
    assert "".join(piece.text for piece in streamed) == stopped.text


def test_the_models_own_stop_tokens_stay(engine):
    stops = engine.model.stop_token_ids
    options = {"max_tokens": 200, "temperature": 3.0, "n": 8, "seed": 1}
    with_more = engine.generate(["hello"], stop_token_ids=[265], **options)
    ended = [one for one in with_more if one.finish_reason == "stop"]
    assert {one.token_ids[-1] for one in ended} <= {*stops, 265}
    assert any(one.token_ids[-1] in stops for one in ended)


@pytest.mark.parametrize("options", [{"max_tokens": 60}, {"max_tokens": 60, "temperature": 3.0, "seed": 2}])
def test_no_stop_token_comes_before_min_tokens(engine, options):
    (free,) = engine.generate(["hello"], ignore_eos=True, **options)
    stops = sorted(set(free.token_ids[:5]))
    early = engine.generate(["hello"], n=4, stop_token_ids=stops, **options)
    assert min(len(one.token_ids) for one in early) <= 5
    late = engine.generate(["hello"], n=4, stop_token_ids=stops, min_tokens=30, **options)
    for one in late:
        assert len(one.token_ids) >= 30
        assert not {*stops, *engine.model.stop_token_ids} & set(one.token_ids[:30])
        assert (one.finish_reason == "stop") == (one.token_ids[-1] in {*stops, *engine.model.stop_token_ids})


def test_min_tokens_holds_after_a_preemption_and_beside_others(model):
    crowded = Engine(model, num_blocks=5)
    options = {"max_tokens": 24, "temperature": 2.0, "seed": 3, "min_tokens": 20, "stop_token_ids": list(range(100))}
    alone = Engine(model, num_blocks=64).generate(["hello", "the hen"], **options)
    together = crowded.generate(["hello", "the hen"], **options)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert all(min(one.token_ids[:20]) >= 100 for one in together)


def test_stop_strings_of_the_first_tokens_do_not_count(engine):
    (free,) = engine.generate(["hello"], **GREEDY)
    stop = free.text[1:3]
    (early,) = engine.generate(["hello"], stop=stop, **GREEDY)
    assert early.text == free.text[: free.text.index(stop)]
    (late,) = engine.generate(["hello"], stop=stop, min_tokens=10, **GREEDY)
    assert len(late.token_ids) >= 10
    assert late.text.startswith(engine.model.tokenizer.decode(free.token_ids[:9]))


def test_special_tokens_are_in_the_text_for_those_who_want_them(engine):
    tokenizer = engine.model.tokenizer
    special = min(tokenizer.special_token_ids)
    banned = [token for token in range(266) if token != special]
    options = {"max_tokens": 3, "min_tokens": 3, "stop_token_ids": banned, "ignore_eos": True}
    (left_out,) = engine.generate(["hello"], **options)
    (shown,) = engine.generate(["hello"], skip_special_tokens=False, **options)
    assert left_out.token_ids == shown.token_ids == [special] * 3
    assert (left_out.text, shown.text) == ("", tokenizer.id_to_token(special) * 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": -1}, "min_tokens: expected an int from 0 to 64, got -1"),
        ({"min_tokens": 65}, "min_tokens: expected an int from 0 to 64, got 65"),
        ({"min_tokens": 1.5}, "min_tokens: .* got 1.5"),
        ({"stop_token_ids": 5}, "stop_token_ids: expected a list of token ids, got 5"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: .* got"),
        ({"stop_token_ids": [True]}, "stop_token_ids: .* got"),
        ({"stop_token_ids": "5"}, "stop_token_ids: .* got '5'"),
        ({"skip_special_tokens": 1}, "skip_special_tokens: expected True or False, got 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        GenerationOptions(**options)


def test_what_the_vocabulary_lacks_is_refused(engine):
    with pytest.raises(InvalidArgumentError, match=r"stop_token_ids: expected token ids below 266, .* got 266"):
        engine.generate(["hello"], stop_token_ids=[266])
    everything = list(range(266))
    with pytest.raises(InvalidArgumentError, match="min_tokens: expected 0, since each token of the vocabulary ends"):
        engine.generate(["hello"], stop_token_ids=everything, min_tokens=1)
    assert engine.generate(["hello"], stop_token_ids=everything)[0].finish_reason == "stop"


def test_a_ban_ends_with_the_tokens_that_it_is_for():
    sampler, sequence = Sampler(SamplingParams(temperature=1.0), seed=5), Sequence("one", [1, 2, 3])
    sampler.ban([4, 5], 2)
    assert sampler.next_draw(sequence, 0).banned == (4, 5)
    sequence.append_tokens([7])
    assert sampler.next_draw(sequence, 1).banned == (4, 5)
    sequence.append_tokens([7])
    assert sampler.next_draw(sequence, 2).banned == ()
