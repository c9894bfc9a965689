"""The deterministic strategies: a token's logits have the same bits however the work was cut, cached or batched.

The bits of one prefill of the whole prompt are the reference. Each scenario computes the same token in another way.
"""

import pytest
import torch
import torch.nn.functional as F
from engine.small_models import BLOCK_SIZE, CONFIGS, EVEN, packed, prefill, random_tokens, random_weights, step

from kvblocks.engine.attention.attention import TorchAttention
from kvblocks.engine.attention.batch import SequenceRows
from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.products import product
from kvblocks.engine.run.determinism import choose_determinism, packed_rows_hold
from kvblocks.engine.run.forward import DecoderModel
from kvblocks.engine.run.rows import FIXED64, NATURAL, PACKED2, PACKED16, TILE16
from kvblocks.errors import InvalidArgumentError

NUM_TOKENS = 150
A, B, C = list(range(20)), list(range(20, 40)), list(range(40, 60))


def build(config, strategy_name):
    """A random model with the strategy that this machine is given, or with the one that any machine can use."""
    weights = random_weights(config)
    if "packed" in strategy_name:
        weights = packed(weights)
    strategy = TILE16 if "tile16" in strategy_name else choose_determinism(config, weights)
    return DecoderModel(config, weights, strategy=strategy)


@pytest.fixture(params=["chosen", "tile16", "chosen, packed weights", "tile16, packed weights"])
def strategy_name(request):
    return request.param


@pytest.fixture(params=CONFIGS)
def model(request, strategy_name):
    return build(CONFIGS[request.param], strategy_name)


@pytest.fixture
def cache(model):
    return model.new_kv_cache(num_blocks=64, block_size=BLOCK_SIZE)


@pytest.fixture
def prompt(model):
    return random_tokens(model.config, NUM_TOKENS)


def context(cache, block_ids, num_tokens):
    """K and V of a sequence's tokens in all layers."""
    rows = [tensor[block_ids].flatten(0, 1)[:num_tokens] for tensor in (*cache.keys, *cache.values)]
    return torch.stack(rows)


def test_prefix_cached(model, cache, prompt):
    full = prefill(model, cache, prompt, A)
    for num_cached in (16, 48, 112, 144):
        prefill(model, cache, prompt[:num_cached], B)
        shared = SequenceRows(prompt[num_cached:], num_cached, B, num_readonly_tokens=num_cached)
        assert torch.equal(step(model, cache, shared)[0], full), num_cached
        assert torch.equal(context(cache, B, NUM_TOKENS), context(cache, A, NUM_TOKENS)), num_cached


def test_full_hit(model, cache, prompt):
    full = prefill(model, cache, prompt[:128], A)
    before = context(cache, A, 128)
    hit = step(model, cache, SequenceRows(prompt[127:128], 127, A, num_readonly_tokens=128))
    assert torch.equal(hit[0], full)
    assert torch.equal(context(cache, A, 128), before)


@pytest.mark.every(3)
@pytest.mark.parametrize("cuts", [(100,), (1, 2, 3), (17, 33, 150 - 1), tuple(range(7, 150, 7))])
def test_chunked_prefill(model, cache, prompt, cuts):
    full = prefill(model, cache, prompt, A)
    assert torch.equal(prefill(model, cache, prompt, B, cuts), full)
    assert torch.equal(context(cache, B, NUM_TOKENS), context(cache, A, NUM_TOKENS))


def test_decode_equals_prefill(model, cache, prompt):
    prefill(model, cache, prompt[:30], A)
    for position in range(30, 63):
        decoded = step(model, cache, SequenceRows(prompt[position : position + 1], position, A))
        assert torch.equal(decoded[0], prefill(model, cache, prompt[: position + 1], B)), position


def test_alone_equals_in_a_batch(model, cache, prompt):
    prefill(model, cache, prompt[:99], C)
    ways = [
        SequenceRows(prompt[:61], 0, A),
        SequenceRows(prompt[99:100], 99, C),
        SequenceRows(prompt[5:42], 0, B),
    ]
    alone = torch.cat([step(model, cache, rows) for rows in ways])
    assert torch.equal(step(model, cache, *ways), alone)
    assert torch.equal(step(model, cache, *reversed(ways)), alone.flip(0))


@pytest.mark.every(3)
def test_many_decodes_and_a_long_prompt_in_one_step(model):
    # More rows than the largest chunk, more logits than the largest chunk of the head.
    cache = model.new_kv_cache(num_blocks=400, block_size=BLOCK_SIZE)
    prompts = [random_tokens(model.config, 20 + seed % 37, seed) for seed in range(70)]
    tables = [list(range(4 * i, 4 * i + 4)) for i in range(70)]
    alone = torch.stack([prefill(model, cache, p, t) for p, t in zip(prompts, tables, strict=True)])
    long = random_tokens(model.config, 390, 99)
    alone_long = prefill(model, cache, long, list(range(300, 330)))
    decodes = [SequenceRows(p[-1:], len(p) - 1, t) for p, t in zip(prompts, tables, strict=True)]
    batch = step(model, cache, SequenceRows(long, 0, list(range(330, 360))), *decodes)
    assert torch.equal(batch, torch.cat([alone_long[None], alone]))


def test_requests_of_one_step_share_blocks(model, cache, prompt):
    full = prefill(model, cache, prompt, A)
    other = prompt[:96] + random_tokens(model.config, 10, seed=5)
    full_other = prefill(model, cache, other, B)
    shared = [*C[:6], 60, 61]
    both = step(
        model,
        cache,
        SequenceRows(other[96:], 96, shared, num_readonly_tokens=96),
        SequenceRows(prompt, 0, C),
    )
    assert torch.equal(both, torch.stack([full_other, full]))


@pytest.mark.every(5)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_on_two_threads(config, strategy_name):
    torch.set_num_threads(2)  # conftest takes it back
    model = build(config, strategy_name)
    cache = model.new_kv_cache(num_blocks=64, block_size=BLOCK_SIZE)
    prompt = random_tokens(config, 75)
    full = prefill(model, cache, prompt, A)
    assert torch.equal(prefill(model, cache, prompt, B, cuts=(3, 64, 74)), full)
    rows = [SequenceRows(prompt[74:], 74, B), SequenceRows(prompt[:19], 0, C), SequenceRows(prompt[64:], 64, A)]
    alone = torch.cat([step(model, cache, sequence) for sequence in rows])
    assert torch.equal(step(model, cache, *rows), alone)
    assert torch.equal(alone[0], full)


def row_by_row(rows, weight, bias):
    """A product whose rows can't depend on each other: each is computed by itself, from a tensor of its own."""
    return torch.stack([F.linear(row.clone(), weight, bias) for row in rows])


def test_packed2_is_for_packed_weights():
    weights = random_weights(EVEN)
    if packed(weights).lm_head.is_mkldnn:
        assert choose_determinism(EVEN, packed(weights), linear=plain_row_by_row).name == "packed2"
    assert choose_determinism(EVEN, weights, linear=row_by_row).name == "packed16"


def plain_row_by_row(rows, weight, bias):
    return row_by_row(rows, weight.to_dense(), bias)


def test_packed16_is_chosen_where_rows_are_independent():
    weights = random_weights(EVEN)
    strategy = choose_determinism(EVEN, weights, linear=row_by_row)
    assert strategy.name == "packed16"
    assert strategy.num_threads == 1


def large_batches_differ(rows, weight, bias):
    return F.linear(rows, weight, bias) * (1 + 1e-6 * (len(rows) > 128))


def some_place_differs(rows, weight, bias):
    product = row_by_row(rows, weight, bias)
    product[9:10] *= 1 + 1e-6
    return product


def last_rows_differ(rows, weight, bias):
    product = row_by_row(rows, weight, bias)
    product[-1] *= 1 + 1e-6
    return product


def only_the_head_differs(rows, weight, bias):
    product = row_by_row(rows, weight, bias)
    return product * (1 + 1e-6 * (len(rows) > 16)) if weight.shape[0] == EVEN.vocab_size else product


def only_the_last_product_differs(rows, weight, bias):
    product = row_by_row(rows, weight, bias)
    return product * (1 + 1e-6 * (len(rows) == 112)) if weight.shape[1] == EVEN.intermediate_size else product


@pytest.mark.parametrize(
    "linear",
    [
        large_batches_differ,
        some_place_differs,
        last_rows_differ,
        only_the_head_differs,
        only_the_last_product_differs,
    ],
)
def test_tile16_is_chosen_where_they_are_not(linear):
    assert choose_determinism(EVEN, random_weights(EVEN), linear=linear) == TILE16


def other_rows_count(rows, weight, bias):
    """A product whose rows depend on the numbers in the others."""
    return row_by_row(rows, weight, bias) + 1e-6 * rows.sum()


class NeverTheSame:
    """A product with other bits in every call."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, rows, weight, bias):
        self.num_calls += 1
        return row_by_row(rows, weight, bias) * (1 + 1e-6 * (self.num_calls % 7))


@pytest.mark.parametrize("linear", [other_rows_count, NeverTheSame()])
def test_where_nothing_holds_a_model_error_says_so(linear):
    with pytest.raises(ModelError, match=r"rows don't depend on the numbers .*in torch\.float32 on 'cpu'"):
        choose_determinism(EVEN, random_weights(EVEN), linear=linear)


def test_fixed64_is_held_where_only_the_number_of_rows_matters():
    weights = random_weights(EVEN)
    assert not packed_rows_hold(EVEN, weights, PACKED16, linear=large_batches_differ)
    assert packed_rows_hold(EVEN, weights, FIXED64, linear=large_batches_differ)
    assert not packed_rows_hold(EVEN, weights, FIXED64, linear=some_place_differs)


def test_fixed64_has_the_same_bits_however_a_prompt_is_cut():
    model = DecoderModel(EVEN, random_weights(EVEN), strategy=FIXED64, linear=row_by_row)
    cache = model.new_kv_cache(num_blocks=64, block_size=BLOCK_SIZE)
    prompt = random_tokens(EVEN, 70)
    assert torch.equal(prefill(model, cache, prompt, A), prefill(model, cache, prompt, B, cuts=(1, 40)))


@pytest.mark.parametrize("strategy", [PACKED2, PACKED16], ids=lambda strategy: strategy.name)
def test_the_check_covers_every_row_count_that_a_step_uses(strategy):
    weights = packed(random_weights(EVEN)) if strategy is PACKED2 else random_weights(EVEN)
    if strategy is PACKED2 and not packed_rows_hold(EVEN, weights, strategy):
        pytest.skip("packed2 is not for this machine")  # the check ends at the first count that fails
    checked, used = set(), set()

    def record(counts):
        def linear(rows, weight, bias):
            counts.add((len(rows), tuple(weight.shape)))
            return product(rows, weight, bias)

        return linear

    packed_rows_hold(EVEN, weights, strategy, linear=record(checked))
    model = DecoderModel(EVEN, weights, strategy=strategy, linear=record(used))
    cache = model.new_kv_cache(num_blocks=64, block_size=BLOCK_SIZE)
    for num_tokens in (*range(2, 33, 2), *range(1, 600, 9)):
        prefill(model, cache, random_tokens(EVEN, num_tokens), list(range(40)))
    for num_sequences in range(1, 80, 13):
        step(model, cache, *(SequenceRows([1], 0, [block]) for block in range(min(num_sequences, 64))))
    assert used == checked


def test_these_tests_see_a_product_that_is_not_exact():
    model = DecoderModel(EVEN, random_weights(EVEN), strategy=PACKED16, linear=large_batches_differ)
    cache = model.new_kv_cache(num_blocks=64, block_size=BLOCK_SIZE)
    prompt = random_tokens(EVEN, 300)
    assert not torch.equal(prefill(model, cache, prompt, A), prefill(model, cache, prompt, B, cuts=(100, 200)))


def test_another_number_of_threads_is_refused():
    weights = random_weights(EVEN)
    model = DecoderModel(EVEN, weights, strategy=choose_determinism(EVEN, weights, linear=row_by_row))
    cache = model.new_kv_cache(num_blocks=4, block_size=BLOCK_SIZE)
    torch.set_num_threads(2)
    with pytest.raises(ModelError, match="expected 1 torch threads, for which packed16 was checked, got 2"):
        step(model, cache, SequenceRows([1], 0, [0]))


def test_a_deterministic_strategy_needs_tiled_attention():
    with pytest.raises(InvalidArgumentError, match="tiled attention backend for tile16"):
        DecoderModel(EVEN, random_weights(EVEN), strategy=TILE16, attention=TorchAttention())
    assert not DecoderModel(EVEN, random_weights(EVEN), strategy=NATURAL).attention.is_tiled
