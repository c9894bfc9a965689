"""Drawing for all rows at once: no draw depends on its batch; limits, ties, logarithms, broken rows."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from engine.sampling.plain import draw, draw_many, probabilities, sample, uniform
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvblocks import Sequence
from kvblocks.engine.errors import BrokenLogitsError
from kvblocks.engine.sampling import batch_sampler
from kvblocks.engine.sampling.batch_sampler import BatchSampler, enqueue, group_draws
from kvblocks.engine.sampling.drawn import Drawn
from kvblocks.engine.sampling.params import SamplingParams
from kvblocks.engine.sampling.sampler import GREEDY, Draw, TokenCounts
from kvblocks.engine.sampling.workspace import Workspace

LOGITS = torch.tensor([1.0, -torch.inf, 3.0, 2.0, 0.0])
WIDE = 5003


@pytest.fixture(autouse=True)
def _one_thread():
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


def wide_logits(num_rows, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, WIDE, generator=generator) * spread


def any_params(chooser):
    """Any combination of sampling parameters."""
    return SamplingParams(
        temperature=chooser.choice([0.0, 0.5, 1.0, 1.0, 2.0]),
        top_k=chooser.choice([None, None, 1, 20, 127, 128, 700, WIDE, 9999]),
        top_p=chooser.choice([1.0, 1.0, 0.3, 0.9, 0.999]),
        min_p=chooser.choice([0.0, 0.0, 0.01, 0.2]),
        presence_penalty=chooser.choice([0.0, 0.0, 0.5]),
        repetition_penalty=chooser.choice([1.0, 1.0, 1.3]),
        logprobs=chooser.choice([None, None, 0, 3, 200]),
    )


def any_draw(chooser, seed):
    params, seen = any_params(chooser), None
    if params.is_penalized:
        sequence = Sequence(seed, [1, 2, 3])
        sequence.append_tokens([chooser.randrange(WIDE) for _ in range(chooser.randrange(1, 20))])
        seen = TokenCounts(with_prompt=True)
        seen.catch_up(sequence)
    banned = tuple(chooser.sample(range(WIDE), chooser.choice([0, 0, 1, 50])))
    return Draw(params, seen, banned), uniform(seed, chooser.randrange(100))


# --- nothing depends on the batch ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixture():
    """Rows and draws of all kinds, and what each draw gives alone."""
    torch.set_num_threads(1)
    chooser = random.Random(5)
    logits = torch.cat([wide_logits(9, spread=spread) for spread in (0.1, 1.0, 3.0)])
    draws = [[any_draw(chooser, 100 * row + number) for number in range(chooser.randrange(4))] for row in range(27)]
    alone = [
        sample(BatchSampler(), logits[row : row + 1].clone(), [[one]])[0]
        for row, own in enumerate(draws)
        for one in own
    ]
    return logits, draws, alone


def test_a_draw_is_the_same_in_any_batch(mixture):
    logits, draws, alone = mixture
    assert len(alone) > 30
    sampler = BatchSampler()
    assert sample(sampler, logits, draws) == alone
    assert sample(sampler, logits, draws) == alone
    assert sample(sampler, logits.flip(0), draws[::-1]) == [drawn for own in split(alone, draws)[::-1] for drawn in own]
    assert sampler.counts.num_draws == 3 * len(alone)


def split(outcomes, draws):
    rest = iter(outcomes)
    return [[next(rest) for _ in own] for own in draws]


@pytest.mark.parametrize("tile", [1, 2 * WIDE, 3 * WIDE + 1])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_neither_tiles_nor_threads_change_a_draw(mixture, monkeypatch, tile, num_threads):
    logits, draws, alone = mixture
    monkeypatch.setattr(batch_sampler, "_CPU_TILE", tile)
    torch.set_num_threads(num_threads)
    assert sample(BatchSampler(), logits, draws) == alone


@pytest.mark.parametrize("num_likely", [1, 16, 300, 2000, WIDE])
def test_however_many_of_the_likely_are_looked_at_first_the_draw_is_the_same(mixture, monkeypatch, num_likely):
    logits, draws, alone = mixture
    monkeypatch.setattr(batch_sampler, "_CPU_LIKELY", num_likely)
    sampler = BatchSampler()
    assert sample(sampler, logits, draws) == alone
    assert sampler.counts.num_sorted > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_count_as_float32(mixture, dtype):
    logits, draws, _ = mixture
    other = logits.to(dtype)
    assert sample(BatchSampler(), other, draws) == sample(BatchSampler(), other.float(), draws)
    assert other.dtype == dtype


def test_nothing_is_read_on_the_host_before_the_one_transfer(mixture):
    """On the meta device, which has no values: reading a value, or a size that depends on one, raises."""
    logits, draws, _ = mixture
    logits = logits.to("meta")
    rows = [row for row, own in enumerate(draws) for _ in own]
    groups = group_draws([one for own in draws for one, _ in own], rows, logits)
    results = enqueue(logits, groups, np.full(len(rows), 0.5), Workspace())
    assert results.shape == (sum(group.num_results * len(group) for group in groups),)
    with pytest.raises(NotImplementedError, match="meta tensor"):
        results.tolist()


class Operations(TorchDispatchMode):
    """Counts what would be launched on a GPU: what gives a tensor on meta, except views and empty memory."""

    VIEWS = (
        *("view", "expand", "slice", "split", "squeeze", "unsqueeze", "unflatten", "unbind", "_unsafe_view", "empty"),
        *("alias", "detach", "flatten", "reshape", "select"),
    )

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        is_view = function.name().removeprefix("aten::").partition(".")[0] in self.VIEWS
        results = found if isinstance(found, tuple | list) else [found]
        self.number += not is_view and any(isinstance(one, torch.Tensor) and one.is_meta for one in results)
        return found


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ([{}], 8),
        ([{"temperature": 1.0}], 40),
        ([{"temperature": 1.0, "top_p": 0.9}], 70),
        ([{}, {"temperature": 1}], 50),
    ],
)
def test_with_a_kernel_a_step_is_an_upload_and_a_launch(options, least):
    """Plain torch is asked for many times as much. docs/design/engine/sampling.md has the numbers."""

    def draw_tokens(logits, parameters):
        return torch.neg(torch.empty(len(parameters), 3, dtype=torch.float64, device=logits.device))

    logits = torch.empty(32, 128256, device="meta")
    draws = [Draw(SamplingParams(**options[row % len(options)])) for row in range(32)]
    numbers = []
    for kernel in (draw_tokens, None):
        with torch.inference_mode(), Operations() as counted:
            groups = group_draws(draws, range(len(draws)), logits, kernel)
            enqueue(logits, groups, np.full(32, 0.5), Workspace())
        numbers.append(counted.number)
    assert numbers[0] == 2
    assert numbers[1] >= least


def test_exp_gives_a_number_the_same_bits_wherever_it_stands():
    """`exp`, the one operation that isn't exact, checked on each machine that runs the tests."""
    values = (wide_logits(4, spread=5.0) - 20).clamp(max=0.0)
    expected = values.exp()
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(values.exp(), expected)
        assert torch.equal(values.repeat(40, 1).exp_()[4:8], expected)
        memory = torch.empty(WIDE + 16)
        for offset in (0, 1, 3, 7):
            part = memory[offset : offset + WIDE]
            assert torch.equal(part.copy_(values[1]).exp_(), expected[1])
        for number in (1, 2, 3, 5, 17, 128, 1000):
            assert torch.equal(values[2, :number].clone().exp_(), expected[2, :number])
    assert torch.zeros(1001).exp().eq(1).all()


def test_tokens_are_pinned():
    """Equal seeds give equal tokens in every version."""
    logits = -torch.arange(1.0, 3001).log()  # of the ranks, in float32
    plain = [draw(logits, seed=seed, position=3, temperature=0.9) for seed in range(8)]
    limited = [draw(logits, seed=seed, position=3, temperature=0.9, top_p=0.8, top_k=90) for seed in range(8)]
    assert (plain, limited) == (PINNED_PLAIN, PINNED_LIMITED)


PINNED_PLAIN = [1358, 13, 1, 6, 5, 1444, 232, 0]
PINNED_LIMITED = [18, 2, 0, 1, 1, 19, 9, 0]


# --- what is left, and what comes first ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"top_k": 1}, {2}),
        ({"top_k": 2}, {2, 3}),
        ({"top_k": 99}, {0, 2, 3, 4}),
        ({"top_p": 0.01}, {2}),
        ({"top_p": 1e-300}, {2}),
        ({"top_p": 0.64}, {2}),  # 0.644, 0.237, 0.087, 0.032
        ({"top_p": 0.65}, {2, 3}),
        ({"top_p": 0.89}, {0, 2, 3}),
        ({"top_p": 0.999}, {0, 2, 3, 4}),
        ({"top_k": 2, "top_p": 0.72}, {2}),  # of the two, the first has 0.731
        ({"top_k": 2, "top_p": 0.74}, {2, 3}),
        ({"min_p": 0.36}, {2, 3}),  # the second has 0.368 of the first's
        ({"min_p": 0.37}, {2}),
        ({"min_p": 1.0}, {2}),
        ({"min_p": 0.1, "top_p": 0.9}, {2, 3}),  # of 0.644, 0.237 and 0.087
        ({"min_p": 0.3, "top_k": 3, "top_p": 0.9}, {2, 3}),
    ],
)
def test_what_is_left_to_draw_from(options, tokens):
    assert set(draw_many(LOGITS, 500, temperature=1.0, **options)) == tokens


@given(
    logits=st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12),
    top_k=st.none() | st.integers(1, 14),
    top_p=st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
)
def test_what_is_kept_is_what_the_definition_says(logits, top_k, top_p, min_p):
    options = {"temperature": 1.0, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    drawn = set(draw_many(torch.tensor(logits), 60, **options))
    assert drawn <= probabilities(logits, SamplingParams(**options)).keys()


@pytest.mark.parametrize("options", [{}, {"top_p": 0.99}, {"top_k": 3}])
@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2.0**-53, 3)])
def test_the_least_and_the_largest_random_number_give_tokens_that_can_come(options, number, token):
    logits = torch.tensor([[-torch.inf, 2.0, -torch.inf, 1.0, -torch.inf]])
    (drawn,) = sample(BatchSampler(), logits, [[(Draw(SamplingParams(temperature=1.0, **options)), number)]])
    assert drawn.token_id == token


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 100}, {"min_p": 0.01}, {"top_k": 60, "top_p": 0.99}])
def test_of_a_steep_distribution_the_likely_ones_are_enough(options):
    sampler = BatchSampler()
    draw_many(-2.0 * torch.arange(1.0, WIDE).log(), 50, sampler=sampler, temperature=1.0, **options)
    assert (sampler.counts.num_draws, sampler.counts.num_sorted) == (50, 0)


@pytest.mark.parametrize("size", [WIDE, WIDE - 1, 4096, 4097])
def test_likely_tokens_are_found_wherever_they_stand(size):
    """The likely tokens are at both ends, in one column of the searched groups, and in one row of them."""
    places = [0, size - 1, size - 2, size // 2, 7, 7 + size // 16, 7 + 2 * (size // 16), 8, 9]
    logits = torch.zeros(size)
    logits[places] = 20 + torch.arange(len(places)).float() / 10
    sampler = BatchSampler()
    assert set(draw_many(logits, 300, sampler=sampler, temperature=1.0, top_p=0.999)) == set(places)
    assert set(draw_many(logits, 300, sampler=sampler, temperature=1.0, top_k=len(places))) == set(places)
    assert sampler.counts.num_sorted == 0


def test_limits_that_keep_all_change_no_draw():
    logits = wide_logits(1)[0]
    assert draw_many(logits, 50, temperature=0.7) == draw_many(logits, 50, temperature=0.7, top_k=WIDE, top_p=1.0)


@pytest.mark.parametrize("size", [6, 200, WIDE])
def test_of_equally_likely_tokens_the_first_count_as_the_more_likely(size):
    sampler = BatchSampler()
    assert set(draw_many(torch.zeros(size), 100, sampler=sampler, temperature=1.0, top_k=2)) == {0, 1}
    assert set(draw_many(torch.zeros(size), 200, temperature=1.0, top_p=2.5 / size)) == {0, 1, 2}
    tied = torch.full((size,), -2.0)
    tied[[1, 3, 4]] = torch.tensor([1.0, 1.0, 1.5])
    assert set(draw_many(tied, 100, temperature=1.0, top_k=2)) == {1, 4}
    assert set(draw_many(tied, 500, temperature=1.0, top_k=4)) == {0, 1, 3, 4}
    assert sampler.counts.num_sorted >= 100  # nobody could tell without a look at all of them


def test_greedy_takes_the_first_of_the_largest_and_heeds_no_limit():
    assert draw(torch.tensor([1.0, 3.0, 2.0, 3.0]), top_p=0.5, top_k=3, min_p=1.0) == 1
    assert draw(torch.full((WIDE,), -torch.inf)) == 0
    logits = wide_logits(8).round()
    tokens = [drawn.token_id for drawn in sample(BatchSampler(), logits, [[(Draw(GREEDY), 0.0)]] * 8)]
    assert tokens == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 1e-308, 5e-324])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}])
def test_the_smallest_temperatures_are_greedy(temperature, options):
    assert set(draw_many(torch.tensor([1.0, 30.0, 29.99999]), 50, temperature=temperature, **options)) == {1}
    assert set(draw_many(torch.tensor([1.0, 30.0, 30.0]), 50, temperature=temperature)) == {1, 2}


@pytest.mark.parametrize("temperature", [1e6, 1e38, 1e308])
def test_the_largest_temperatures_make_all_equally_likely_but_what_is_masked(temperature):
    tokens = Counter(draw_many(torch.tensor([1.0, -torch.inf, 30.0, -30.0]), 3000, temperature=temperature))
    assert tokens.keys() == {0, 2, 3}
    assert min(tokens.values()) > 900


# --- rows that are not as they should be -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"logprobs": 2}])
def test_a_row_with_nan_keeps_no_other_from_its_token(options):
    logits = wide_logits(4)
    one = Draw(SamplingParams(**options)), 0.3
    expected = sample(BatchSampler(), logits, [[one]] * 4)
    logits[1, 3] = torch.nan
    outcomes = sample(BatchSampler(), logits, [[one], [one, one], [one, error := ValueError("no token today")], [one]])
    assert [type(outcomes[place]) for place in (1, 2)] == [BrokenLogitsError] * 2
    assert [outcomes[place] for place in (0, 3, 4, 5)] == [expected[0], expected[2], error, expected[3]]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.5}, {"repetition_penalty": 2.0}])
@pytest.mark.parametrize("size", [1, 129, WIDE])
def test_a_row_of_nan_throughout_breaks_nothing(options, size):
    logits = torch.full((1, size), torch.nan)
    for number in (0.0, 0.5, 1 - 2.0**-53):
        drawn = Draw(SamplingParams(temperature=1.0, logprobs=3, **options)), number
        assert isinstance(sample(BatchSampler(), logits, [[drawn]])[0], BrokenLogitsError)


@pytest.mark.parametrize("size", [5003, 33333, 131072])
def test_the_largest_random_number_stays_below_the_sum_of_all_weights(size):
    """Also where the sum has more bits than a float."""
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(size)) / 10
    logits[0, -1] = -torch.inf
    for options in ({}, {"top_p": 1 - 1e-15}):
        drawn = Draw(SamplingParams(temperature=1.0, **options)), 1 - 2.0**-53
        (outcome,) = sample(BatchSampler(), logits, [[drawn]])
        assert logits[0, outcome.token_id].isfinite()


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}])
def test_infinite_logits_take_all(options):
    logits = torch.tensor([torch.inf, 1.0, -torch.inf, torch.inf])
    assert set(draw_many(logits, 50, temperature=1.0, **options)) == {0, 3}
    assert draw(logits) == 0


@pytest.mark.parametrize("masked", [-torch.inf, torch.finfo(torch.float32).min])
def test_of_a_row_that_is_masked_throughout_any_token_may_come(masked):
    logits = torch.full((8,), masked)
    assert len(set(draw_many(logits, 200, temperature=1.0))) == 8
    assert set(draw_many(logits, 50, temperature=1.0, top_k=2)) == {0, 1}
    logits[5] = 0.0
    assert set(draw_many(logits, 50, temperature=1.0)) == {5}


def test_no_rows_have_no_tokens():
    assert sample(BatchSampler(), torch.empty(0, 40), []) == []
    assert sample(BatchSampler(), torch.zeros(2, 40), [[], []]) == []


# --- logarithms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 5, 127, 128, 1000])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.3}, {"temperature": 0.5, "top_k": 4}])
def test_logarithms_are_those_of_the_logits_as_they_came(number, options):
    logits = wide_logits(3)
    draws = [[(Draw(SamplingParams(logprobs=number, **options)), 0.7)]] * 3
    for drawn, row in zip(sample(BatchSampler(), logits, draws), logits, strict=True):
        expected = row.double().log_softmax(0)
        assert abs(drawn.logprobs.logprob - float(expected[drawn.token_id])) < 1e-5
        wanted = expected.sort(descending=True, stable=True)
        assert [token for token, _ in drawn.logprobs.top] == wanted.indices[:number].tolist()
        for (_, logprob), value in zip(drawn.logprobs.top, wanted.values.tolist(), strict=False):
            assert abs(logprob - value) < 1e-5


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9}])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_what_is_banned_is_as_if_it_were_impossible(options, penalty):
    """The same row may have any other draw as well, and the logits stay unchanged."""
    logits, params = wide_logits(1), SamplingParams(presence_penalty=penalty, logprobs=2, **options)
    seen = TokenCounts(with_prompt=False)
    banned = tuple(int(token) for token in logits[0].topk(300).indices)
    draws = [(Draw(params, seen, banned), uniform(3, number)) for number in range(40)]
    free = [(Draw(params, seen), uniform(3, number)) for number in range(40)]
    outcomes = sample(BatchSampler(), logits, [draws + free])
    masked = logits.clone()
    masked[0, list(banned)] = -torch.inf
    expected = [one.token_id for one in sample(BatchSampler(), masked, [free])]
    assert [one.token_id for one in outcomes[:40]] == expected
    assert not set(expected) & set(banned)
    assert {one.logprobs.top for one in outcomes} == {outcomes[40].logprobs.top}
    assert logits.isfinite().all()


def test_a_ban_hides_no_nan():
    logits = wide_logits(1)
    logits[0, 7] = torch.nan
    (outcome,) = sample(BatchSampler(), logits, [[(Draw(GREEDY, banned=(7, 8)), 0.0)]])
    assert isinstance(outcome, BrokenLogitsError)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("repetition", [1.0, 2.0, 1e39, 1e308, 1e-39, 1e-308])
@pytest.mark.parametrize(
    ("frequency", "presence"), [(0.0, 0.0), (1e308, 0.0), (0.0, 1e308), (-1e308, 0.0), (1e308, -1e308), (2e38, 2e38)]
)
def test_penalties_that_float32_has_no_numbers_for_make_no_nan(temperature, repetition, frequency, presence):
    sequence = Sequence("one", [0, 1, 2, 3])
    sequence.append_tokens([0, 0, 1, 3])
    params = SamplingParams(
        temperature=temperature,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    seen = TokenCounts(with_prompt=True)
    seen.catch_up(sequence)
    logits = torch.tensor([[0.0, 3.0, -3.0, -torch.inf, 1.0], [-0.0, 3e38, -3e38, torch.inf, 1.0]])
    draws = [[(Draw(params, seen), 0.5)]] * 2
    assert all(isinstance(outcome, Drawn) for outcome in sample(BatchSampler(), logits, draws))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_change_no_logarithm(temperature):
    logits = wide_logits(1)
    sequence, seen = Sequence("one", logits[0].topk(20).indices.tolist()), TokenCounts(with_prompt=True)
    seen.catch_up(sequence)
    params = SamplingParams(temperature=temperature, repetition_penalty=1e6, logprobs=5)
    (drawn,) = sample(BatchSampler(), logits, [[(Draw(params, seen), 0.5)]])
    expected = logits[0].double().log_softmax(0)
    assert drawn.token_id not in sequence.token_ids()
    assert abs(drawn.logprobs.logprob - float(expected[drawn.token_id])) < 1e-5
    assert [token for token, _ in drawn.logprobs.top] == sequence.token_ids()[:5]


def test_equally_likely_tokens_are_named_in_the_order_of_the_vocabulary():
    logits = torch.zeros(WIDE)
    logits[[4000, 17]] = 1.0
    (drawn,) = sample(BatchSampler(), logits.unsqueeze(0), [[(Draw(SamplingParams(logprobs=5)), 0.0)]])
    assert [token for token, _ in drawn.logprobs.top] == [17, 4000, 0, 1, 2]


def test_no_more_tokens_are_named_than_there_are_and_all_logarithms_are_finite():
    (drawn,) = sample(BatchSampler(), LOGITS.unsqueeze(0), [[(Draw(SamplingParams(logprobs=9)), 0.0)]])
    assert [token for token, _ in drawn.logprobs.top] == [2, 3, 0, 4, 1]
    assert drawn.logprobs.top[4][1] < -1e38
    assert drawn.logprobs.top[0] == (2, drawn.logprobs.logprob)
    assert torch.tensor([logprob for _, logprob in drawn.logprobs.top]).isfinite().all()


def test_who_asks_for_nothing_gets_nothing(mixture):
    _, draws, alone = mixture
    asked = [one.params.logprobs for own in draws for one, _ in own]
    for number, drawn in zip(asked, alone, strict=True):
        assert (drawn.logprobs is None) == (number is None)
        assert number is None or len(drawn.logprobs.top) == number


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 20, "logprobs": 2}])
def test_a_bias_is_as_if_the_logits_were_larger(options):
    logits = torch.randn(1, WIDE, generator=torch.Generator().manual_seed(4))
    chosen = [int(token) for token in logits[0].topk(40).indices]
    bias = tuple((token, 3.0 if index % 2 else -4.5) for index, token in enumerate(chosen))
    params, biased = SamplingParams(**options), logits.clone()
    for token, value in bias:
        biased[0, token] += value
    draws = [(Draw(params, bias=bias), uniform(3, number)) for number in range(40)]
    plain = [(Draw(params), uniform(3, number)) for number in range(40)]
    sampler = BatchSampler()
    found = [one.token_id for one in sample(sampler, logits, [draws])]
    assert found == [one.token_id for one in sample(sampler, biased, [plain])]
    assert found != [one.token_id for one in sample(sampler, logits, [plain])]
    if "logprobs" in options:  # they are the model's own
        (outcome,) = sample(sampler, logits, [draws[:1]])
        expected = torch.log_softmax(logits[0].double(), 0)[outcome.token_id]
        assert outcome.logprobs.logprob == pytest.approx(float(expected), abs=1e-5)
