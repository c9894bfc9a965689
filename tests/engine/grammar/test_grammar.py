"""Answers of a given form: every whole answer matches its grammar, and other requests' answers don't change."""

import json
import random
import re
import sys
from dataclasses import replace
from functools import reduce

import pytest
import torch
from engine.sampling.plain import sample

from kvblocks.engine import Engine, LoadedModel, StepLimits
from kvblocks.engine.errors import GrammarError, ModelError
from kvblocks.engine.grammar.bounds import MAX_BYTES, MAX_MULTIPLE, MAX_TEXT, check_schema
from kvblocks.engine.grammar.grammar import GrammarCompiler
from kvblocks.engine.sampling.batch_sampler import BatchSampler
from kvblocks.engine.sampling.params import SamplingParams
from kvblocks.engine.sampling.sampler import Draw
from kvblocks.errors import InvalidArgumentError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "é", None]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = [5, 70, 80]


@pytest.fixture(scope="module")
def model(tiny_folder):
    model = LoadedModel.load(tiny_folder)
    return replace(model, config=replace(model.config, max_position_embeddings=2048))


@pytest.fixture(scope="module")
def compiler(model):
    return GrammarCompiler(model.tokenizer, model.config.vocab_size, sorted(model.stop_token_ids))


@pytest.fixture(scope="module")
def person(compiler):
    return compiler.json_schema(PERSON)


def is_person(text):
    value = json.loads(text)
    assert set(value) <= {"name", "age", "tags"}
    assert len(value["name"]) <= 8
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 120
    assert all(tag in {"a", "é", None} for tag in value.get("tags", []))
    assert len(value.get("tags", [])) <= 2
    return True


def answers(model, **options):
    """Twelve answers to one prompt. At high temperatures they are all different."""
    return Engine(model, num_blocks=512).generate([PROMPT], n=12, seed=7, max_tokens=150, **options)


def test_no_token_is_remembered_for_a_grammar_or_by_it(model, person):
    engine = Engine(model, num_blocks=64, deterministic=True, remember_next_token=True)
    (first,) = engine.generate([PROMPT], max_tokens=60, grammar=person)
    engine.generate([PROMPT], max_tokens=4)
    (again,) = engine.generate([PROMPT], max_tokens=60, grammar=person)
    assert again.token_ids == first.token_ids
    assert (len(engine.scheduler.remembered), engine.scheduler.remembered.num_answers) == (1, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 8.0])
def test_whatever_is_drawn_a_whole_answer_is_json_by_its_schema(model, person, temperature):
    found = answers(model, temperature=temperature, grammar=person)
    whole = [completion for completion in found if completion.finish_reason == "stop"]
    assert len(whole) >= (6 if temperature else 0)
    assert all(is_person(completion.text) for completion in whole)
    assert all(completion.token_ids[-1] in model.stop_token_ids for completion in whole)
    if temperature:
        assert len({completion.text for completion in whole}) > 3


@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"repetition_penalty": 1.7, "presence_penalty": 1.5}]
)
def test_limits_and_penalties_choose_among_what_may_come(model, person, options):
    found = answers(model, temperature=3.0, grammar=person, **options)
    assert all(is_person(completion.text) for completion in found if completion.finish_reason == "stop")
    assert any(completion.finish_reason == "stop" for completion in found)


def test_texts_patterns_and_any_object(model, compiler):
    choice, pattern = compiler.choice(["yes", "no", 'with "quotes" \\ é']), compiler.regex("[0-9]{3}-[a-c]+x")
    found = answers(model, temperature=2.0, grammar=choice)
    assert {completion.text for completion in found} == {"yes", "no", 'with "quotes" \\ é'}
    for completion in answers(model, temperature=2.0, grammar=pattern):
        assert completion.finish_reason != "stop" or re.fullmatch("[0-9]{3}-[a-c]+x", completion.text)
    whole = [
        one for one in answers(model, temperature=1.0, grammar=compiler.json_object()) if one.finish_reason == "stop"
    ]
    assert whole
    assert all(isinstance(json.loads(completion.text), dict) for completion in whole)


def test_a_choice_may_have_a_thousand_texts_and_some_may_begin_others(model, compiler):
    texts = [f"{number:03} {'yes' if number % 2 else 'no'}" for number in range(1000)]
    found = answers(model, temperature=8.0, grammar=compiler.choice(texts))
    assert len({completion.text for completion in found}) > 6
    assert {completion.text for completion in found} <= set(texts)
    assert all(completion.finish_reason == "stop" for completion in found)
    drawn = random.Random(1)
    long = ["".join(drawn.choice("abcdefgh ") for _ in range(60)) for _ in range(1000)]
    found = answers(model, temperature=8.0, grammar=compiler.choice(long))
    assert {completion.text for completion in found} <= set(long)
    nested = ["a", "ab", "abc", "b"]
    found = answers(model, temperature=8.0, grammar=compiler.choice(nested))
    assert {completion.text for completion in found} == set(nested)


def test_samples_of_a_prompt_have_their_own_places_in_it(model, person):
    together = Engine(model, num_blocks=512).generate(
        [PROMPT], n=4, seed=3, max_tokens=150, temperature=2, grammar=person
    )
    assert len({completion.text for completion in together}) == 4
    alone = Engine(model, num_blocks=512).generate([PROMPT], seed=3, max_tokens=150, temperature=2, grammar=person)
    assert together[0].token_ids == alone[0].token_ids
    assert all(is_person(completion.text) for completion in together if completion.finish_reason == "stop")


def test_preemption_changes_no_token(model, person):
    def generate(num_blocks):
        engine = Engine(model, num_blocks=num_blocks, deterministic=True)
        engine.limits = StepLimits(max_num_batched_tokens=32, max_num_seqs=4, watermark=0.0)
        generations = [
            *(
                engine.submit([5, 6, seed], seed=seed, max_tokens=70, temperature=3.0, grammar=person)[0]
                for seed in range(4)
            )
        ]
        while engine.has_work:
            engine.step()
        return [one.completion.token_ids for one in generations], sum(
            one.request.num_preemptions for one in generations
        )

    expected, none = generate(256)
    found, number = generate(9)
    assert (found, none) == (expected, 0)
    assert number > 0


def test_a_step_that_died_or_was_interrupted_leaves_the_answer_where_it_was(model, compiler, monkeypatch):
    person = compiler.choice(["abcdefghijklmnop"])  # no token may come twice
    options = {"seed": 4, "max_tokens": 60, "temperature": 2.0, "grammar": person}
    (expected,) = Engine(model, num_blocks=64, deterministic=True).generate([PROMPT], **options)
    engine = Engine(model, num_blocks=64, deterministic=True)
    stream, found = engine.stream([PROMPT], **options), []
    found += [next(stream).token_id for _ in range(5)]
    (generation,) = engine.stepper._generations.values()  # noqa: SLF001
    state = generation.sampler.constraint
    matcher, left = state._matcher, [2]  # noqa: SLF001

    class Interrupted:
        def consume_token(self, token):
            left[0] -= 1
            if not left[0]:
                matcher.consume_token(token)
                raise KeyboardInterrupt
            return matcher.consume_token(token)

        def __getattr__(self, name):
            return getattr(matcher, name)

    state._matcher = Interrupted()  # noqa: SLF001
    found.append(next(stream).token_id)

    def draw_twice():
        generation.next_draw(1)
        generation.request.sequence.append_tokens([found[-1]])
        generation.next_draw(2)

    with pytest.raises(KeyboardInterrupt):
        draw_twice()
    assert not state._is_whole  # noqa: SLF001
    stream.close()
    fresh = person.start()
    tokens = generation.request.sequence.token_ids(3)[:6]
    assert tokens[:6] == expected.token_ids[:6]
    again = fresh.allowed_after(tokens).clone()
    sequence = generation.request.sequence
    monkeypatch.setattr(type(sequence), "token_ids", lambda self, start=0, stop=None: [0, 0, 0, *tokens][start:stop])
    assert torch.equal(state.allowed(sequence), again)


def test_answers_beside_it_have_the_same_bits(model, person):
    def plain(**beside):
        engine = Engine(model, num_blocks=256, deterministic=True)
        one = engine.submit([9, 8, 7], seed=1, max_tokens=30, temperature=1.0)[0]
        for seed in range(3):
            engine.submit(PROMPT, seed=seed, max_tokens=30, temperature=1.0, **beside)
        while one.completion is None:
            engine.step()
        return one.completion.token_ids

    assert plain(grammar=person) == plain()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_only_rows_with_a_mask_are_masked_and_nan_stays_nan(temperature, logprobs):
    """70 tokens don't fill the mask's last word. Row 0 may take token 3 alone, row 1 any; row 2 has a NaN."""
    words = torch.zeros(3, dtype=torch.int32)
    words[0] = 8
    params = SamplingParams(temperature=temperature, logprobs=logprobs)
    logits = torch.zeros(4, 70)
    logits[:, 69] = 5.0
    logits[2, 9] = float("nan")
    last = torch.zeros(3, dtype=torch.int32)
    last[2] = 32 | 16
    draws = [
        [(Draw(params, allowed=words), 0.99)],
        [(Draw(params), 0.99)],
        [(Draw(params, allowed=words), 0.99)],
        [(Draw(params, allowed=last), 0.99)],
    ]
    one, other, broken, end = sample(BatchSampler(), logits, draws)
    assert (one.token_id, other.token_id, end.token_id) == (3, 69, 69)
    assert isinstance(broken, ModelError)
    if logprobs is not None:
        expected = logits.log_softmax(-1)
        assert one.logprobs.logprob == pytest.approx(float(expected[0, 3]))  # the model's own, as before the mask
        assert one.logprobs.top[0] == (69, pytest.approx(float(expected[0, 69])))


REFUSED = {
    "a type that isn't one": {"type": "nonsense"},
    "an unsupported keyword": {"not": {"type": "string"}},
    "a remote schema": {"$ref": "http://localhost/x.json"},
    "itself": {"$ref": "#"},
    "a broken pattern": {"type": "string", "pattern": "("},
    "deep nesting": reduce(lambda inner, _: {"items": inner}, range(70), {"type": "integer"}),
    "too long": {"enum": ["x" * 100] * (MAX_BYTES // 100)},
    "a long text": {"const": {"a": ["x" * (MAX_TEXT + 1)]}},
    "a long name": {"properties": {"x" * (MAX_TEXT + 1): {}}},
    "half a character": {"required": ["\ud800"]},
    "half a character for people": {"title": "\ud800"},
    "more than a number": {"minimum": float("inf")},
    "a number that the compiler doesn't read": {"minimum": 10**400},
    "a large multiple": {"type": "integer", "multipleOf": 999_983},
    "multiples together": {"allOf": [{"type": "integer", "multipleOf": number} for number in (997, 991, 983)]},
    "a tiny multiple": {"allOf": [{"multipleOf": 1e-11}, {"multipleOf": 7}]},
    "a huge multiple": {"multipleOf": 1e300},
    "a product of alternatives": {
        "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(12)]
    },
    "options of the compiler's": {"type": "object", "x-guidance": {"lenient": True}},
    "not JSON": {"enum": {1, 2}},
    "nothing that could be": {"enum": []},
}


@pytest.mark.parametrize("schema", REFUSED.values(), ids=REFUSED)
def test_hostile_and_unsupported_schemas_are_refused(compiler, schema):
    with pytest.raises(InvalidArgumentError):
        compiler.json_schema(schema)


@pytest.mark.parametrize("name", [name for name in REFUSED if "multiple" in name])
def test_multiples_are_refused_before_anything_is_compiled(name):
    with pytest.raises(InvalidArgumentError, match="least common multiple is at most 10000"):
        check_schema(REFUSED[name])


def test_patterns_and_texts_are_refused_too(compiler):
    for pattern in ("(", "a" * (MAX_TEXT + 1), "(?=a)b", "\ud800"):
        with pytest.raises(InvalidArgumentError):
            compiler.regex(pattern)
    for texts in ([], ["a", ""], ["b", "a" * (MAX_TEXT + 1)], ["\ud800"], ["a" * MAX_TEXT] * 16):
        with pytest.raises(InvalidArgumentError):
            compiler.choice(texts)


def test_what_is_short_to_write_and_long_to_read_ends_at_its_first_tokens(compiler, model):
    """For each token the grammar would have to be read to its end."""
    state = compiler.regex("x{50000}").start()
    (token,) = model.tokenizer.encode("x")

    def look(times):
        for _ in range(times):
            state.allowed_after([token])

    with pytest.raises(GrammarError, match="within the limits"):
        look(3)


def test_texts_up_to_the_bound_are_taken_and_longer_ones_that_are_for_people(compiler):
    compiler.choice(["a" * MAX_TEXT, "b"])
    compiler.regex("a" * MAX_TEXT)
    described = {
        "description": "x" * 3 * MAX_TEXT,
        "title": "é" * MAX_TEXT,
        "properties": {"description": {"const": "a"}},
    }
    compiler.json_schema({"type": "object", **described, "required": ["description"]})


def test_multiples_up_to_the_bound_are_taken(compiler):
    assert MAX_MULTIPLE == 10_000
    for numbers in ([9973], [0.01, 5], [1e-7], [250, 400]):
        compiler.json_schema({"allOf": [{"type": "number", "multipleOf": number} for number in numbers]})


@pytest.mark.parametrize(
    ("pattern", "must_end"),
    [
        ("([a-z]{1,1000}){1,1000}", True),
        ("(.*[ab].{18}|.*[bc].{19}|.*[de].{17})", False),
        ("(.*a.{20,30}){5}", False),
    ],
)
def test_a_pattern_that_explodes_ends_its_answer_and_no_other(model, compiler, pattern, must_end):
    """Each one compiles fast, but has exponentially many states, which answers reach sooner or later."""
    grammar = compiler.regex(pattern)
    engine = Engine(model, num_blocks=128)
    hostile = [
        engine.submit(PROMPT, seed=seed, max_tokens=100, temperature=5.0, grammar=grammar)[0] for seed in range(3)
    ]
    other = engine.submit([9, 8, 7], max_tokens=40, ignore_eos=True)[0]
    while engine.has_work:
        engine.step()
    assert len(other.completion.token_ids) == 40
    for one in hostile:
        if one.finish_reason == "error":
            assert isinstance(one.error, GrammarError)
            assert "within the limits" in str(one.error)
        else:
            assert one.finish_reason in {"stop", "length"}
    assert not must_end or any(one.finish_reason == "error" for one in hostile)


def test_random_walks_through_masks_are_what_a_reader_of_json_takes(compiler, person, model):
    """Tokens are not drawn by the sampler but uniformly from the allowed ones, so that rare tokens come too."""
    draw, num_whole = random.Random(5), 0
    for _ in range(40):
        state, tokens = person.start(), []
        words = state.allowed_after(())
        while len(tokens) < 400:
            bits = words.unsqueeze(-1).bitwise_right_shift(torch.arange(32, dtype=torch.int32)).bitwise_and(1).flatten()
            allowed = bits.nonzero().flatten().tolist()
            assert max(allowed) < model.config.vocab_size
            token = draw.choice(allowed)
            if token in model.stop_token_ids:
                num_whole += is_person(model.tokenizer.decode(tokens))
                break
            tokens.append(token)
            words = state.allowed_after([token])
    assert num_whole > 10


def test_bad_options_are_refused(model, person, compiler, monkeypatch):
    engine = Engine(model, num_blocks=64)
    for options, name in (({"ignore_eos": True}, "ignore_eos"), ({"min_tokens": 2}, "min_tokens")):
        with pytest.raises(InvalidArgumentError, match=f"{name}: expected none with a grammar"):
            engine.generate([PROMPT], grammar=person, **options)
    with pytest.raises(InvalidArgumentError, match="grammar: expected None or what a GrammarCompiler returns"):
        engine.generate([PROMPT], grammar={})
    other = GrammarCompiler(model.tokenizer, 300, sorted(model.stop_token_ids)).json_object()
    with pytest.raises(InvalidArgumentError, match="expected one for the model's vocabulary of 266, got one for 300"):
        engine.generate([PROMPT], grammar=other)
    for tokenizer, stops, lacks in ((None, [2], "tokenizer"), (model.tokenizer, [], "token that ends an answer")):
        with pytest.raises(ModelError, match=f"got one without a {lacks}"):
            GrammarCompiler(tokenizer, 266, stops)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'kvblocks\[structured\]'"):
        GrammarCompiler(model.tokenizer, 266, [2])


@pytest.mark.model
def test_a_real_model_writes_what_its_schema_says(smollm2_folder):
    model = LoadedModel.load(smollm2_folder)
    compiler = GrammarCompiler(model.tokenizer, model.config.vocab_size, sorted(model.stop_token_ids))
    grammar = compiler.json_schema(PERSON)
    prompt = model.tokenizer.apply_chat_template([{"role": "user", "content": "A person's name and age, as JSON."}])
    engine = Engine(model, num_blocks=64)
    for completion in engine.generate([prompt], n=2, max_tokens=40, temperature=1.0, seed=1, grammar=grammar):
        assert completion.finish_reason != "stop" or is_person(completion.text)
