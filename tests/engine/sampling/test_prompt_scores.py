"""Log probabilities of prompts: those of an independent forward pass, whatever the cache and the scheduler do."""

import pytest
import torch
from engine.small_models import EVEN, random_weights
from transformers import AutoModelForCausalLM

from kvblocks.engine import Engine, LoadedModel, StepLimits
from kvblocks.engine.errors import BrokenLogitsError
from kvblocks.engine.sampling.prompt_scores import PromptScores, ScoredRows, Scorer
from kvblocks.errors import InvalidArgumentError

TOLERANCE = 1e-3  # of float32 with this model: transformers' own is 4e-4 away from float64
PROMPT = [(7 * index + index * index) % 260 + 3 for index in range(150)]


@pytest.fixture(scope="module")
def model(tiny_folder):
    return LoadedModel.load(tiny_folder)


@pytest.fixture(scope="module")
def reference(tiny_folder):
    """Log probabilities by transformers: of what follows each token of a prompt, float64 [tokens, vocab]."""
    other = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)

    def compute(token_ids):
        with torch.inference_mode():
            return other(torch.tensor([token_ids])).logits[0].log_softmax(-1)

    return compute


def check(found, expected, token_ids, width):
    assert found[0] is None
    assert len(found) == len(token_ids)
    for position, one in enumerate(found[1:], 1):
        row = expected[position - 1]
        assert one.logprob == pytest.approx(float(row[token_ids[position]]), abs=TOLERANCE)
        assert len(one.top) == width
        best = row.topk(width).values.tolist() if width else []
        assert [logprob for _, logprob in one.top] == pytest.approx(best, abs=TOLERANCE)
        assert all(logprob == pytest.approx(float(row[token]), abs=TOLERANCE) for token, logprob in one.top)


@pytest.mark.parametrize("limits", [None, StepLimits(max_num_batched_tokens=7, max_num_seqs=3)])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_they_are_those_of_an_independent_pass_though_all_of_it_is_cached(model, reference, limits, max_tokens):
    engine = Engine(model, num_blocks=64)
    engine.limits = limits or engine.limits
    engine.generate([PROMPT], max_tokens=1)
    (completion,) = engine.generate([PROMPT], max_tokens=max_tokens, prompt_logprobs=3)
    check(completion.prompt_logprobs, reference(PROMPT), PROMPT, 3)
    assert (completion.num_cached_tokens, completion.logprobs) == (0, None)
    (again,) = engine.generate([PROMPT], max_tokens=1)
    assert again.num_cached_tokens == 144  # it has left what was cached, and others take it
    assert again.prompt_logprobs is None


def test_the_generated_ones_are_those_of_an_independent_pass(model, reference):
    (completion,) = Engine(model, num_blocks=64).generate(
        [PROMPT], max_tokens=12, logprobs=4, temperature=1.5, seed=3, ignore_eos=True
    )
    tokens = PROMPT + completion.token_ids
    check([None, *completion.logprobs], reference(tokens)[149:], [0, *completion.token_ids], 4)


def test_prompts_beside_others_and_of_one_token(model, reference):
    engine = Engine(model, num_blocks=64)
    prompts = [PROMPT[:1], PROMPT[:2], PROMPT[:90], PROMPT]
    plain = engine.submit(PROMPT[:40], max_tokens=6)[0]
    for prompt, completion in zip(prompts, engine.generate(prompts, max_tokens=2, prompt_logprobs=0), strict=True):
        check(completion.prompt_logprobs, reference(prompt), prompt, 0)
    while plain.completion is None:
        engine.step()
    assert plain.completion.prompt_logprobs is None


def test_a_request_that_is_preempted_while_it_is_scored_goes_on_where_it_was(model, reference):
    """Two long prompts in a pool that holds one of them, chunk by chunk: the younger one loses its blocks."""
    engine = Engine(model, num_blocks=15)
    engine.limits = StepLimits(max_num_batched_tokens=16, max_num_seqs=2, max_num_chunk_tokens=8, watermark=0.0)
    other = [token + 1 for token in PROMPT]
    generations = [
        *engine.submit(PROMPT, max_tokens=3, prompt_logprobs=1),
        *engine.submit(other, max_tokens=3, prompt_logprobs=1),
    ]
    while engine.has_work:
        engine.step()
    assert generations[1].request.num_preemptions > 0
    for prompt, generation in zip((PROMPT, other), generations, strict=True):
        check(generation.completion.prompt_logprobs, reference(prompt), prompt, 1)


@pytest.mark.parametrize("num_steps", [0, 4])
def test_samples_share_the_scores_of_their_prompt_and_the_next_one_goes_on_with_them(model, reference, num_steps):
    engine = Engine(model, num_blocks=64)
    engine.limits = StepLimits(max_num_batched_tokens=16, max_num_seqs=3)
    engine.generate([PROMPT], max_tokens=1)
    first, *others = engine.submit(PROMPT, n=3, max_tokens=2, temperature=1, prompt_logprobs=2)
    for _ in range(num_steps):
        engine.step()
    assert not first.pieces
    engine.cancel(first)
    while engine.has_work:
        engine.step()
    for generation in others:
        check(generation.completion.prompt_logprobs, reference(PROMPT), PROMPT, 2)
        first_piece, second_piece = generation.pieces
        assert first_piece.prompt_logprobs == generation.completion.prompt_logprobs
        assert second_piece.prompt_logprobs is None


def test_a_step_that_died_is_scored_again(model, reference):
    engine = Engine(model, num_blocks=64)
    engine.limits = StepLimits(max_num_batched_tokens=16, max_num_seqs=3)
    run, left = engine.runner.run, [3]

    def run_or_die(*arguments):
        left[0] -= 1
        logits = run(*arguments)
        if not left[0]:
            raise RuntimeError("the fourth step dies")
        return logits

    engine.runner.run = run_or_die
    stream = engine.stream([PROMPT], max_tokens=1, prompt_logprobs=1)
    with pytest.raises(RuntimeError, match="the fourth step dies"):
        next(stream)
    (completion,) = engine.generate([PROMPT], max_tokens=1, prompt_logprobs=1)
    check(completion.prompt_logprobs, reference(PROMPT), PROMPT, 1)


def test_in_a_deterministic_engine_they_have_the_same_bits_however_they_are_cut(model):
    def scores(limits):
        engine = Engine(model, num_blocks=64, deterministic=True)
        engine.limits = limits
        return engine.generate([PROMPT], max_tokens=1, prompt_logprobs=2)[0].prompt_logprobs

    assert scores(StepLimits()) == scores(StepLimits(max_num_batched_tokens=11, max_num_seqs=2))


def test_broken_weights_are_told_and_leave_nothing_in_the_cache():
    weights = random_weights(EVEN)
    weights.embedding[5] = float("nan")
    engine = Engine(LoadedModel(EVEN, weights), num_blocks=64)
    with pytest.raises(BrokenLogitsError):
        engine.generate([[3] * 40 + [5] + [3] * 20], max_tokens=0, prompt_logprobs=1)
    assert engine.generate([[3] * 40], max_tokens=0)[0].num_cached_tokens == 0


@pytest.mark.parametrize("value", [-1, 1001, 1.5, True, "1"])
def test_bad_numbers_are_refused(model, value):
    with pytest.raises(InvalidArgumentError, match="prompt_logprobs"):
        Engine(model, num_blocks=8).generate([PROMPT[:5]], prompt_logprobs=value)


def test_a_long_prompts_logits_are_never_there_together():
    """8,191 rows of 49,152 logits would be 1.6 GB."""
    sizes = []

    def head(rows):
        sizes.append(len(rows))
        return torch.zeros(1, 49_152).expand(len(rows), -1)

    scores = PromptScores(8192, 0)
    scorer = Scorer([ScoredRows(scores, 0, range(1, 8192))])
    scorer(torch.empty(8192, 1), head)
    assert scores.logprobs == [None]  # until the step stands
    scorer.commit()
    assert (scores.is_whole, sum(sizes)) == (True, 8191)
    assert max(sizes) * 49_152 * 4 <= 16 * 2**20
    (logprob,) = {one.logprob for one in scores.logprobs[1:]}
    assert logprob == pytest.approx(-10.8027, abs=1e-3)
