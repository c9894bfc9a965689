"""K and V in 8 bits: the same bits however they are computed, close to the model's own, never another prompt's."""

from dataclasses import replace

import pytest
import torch

from engine.small_models import EVEN, GEMMA3, ODD, random_tokens, random_weights
from kvblocks.engine import Engine, LoadedModel, ModelError, StepLimits, TierOptions
from kvblocks.engine.attention.kv_scales import E4M3, KVScales
from kvblocks.engine.run.calibration import calibrate
from kvblocks.errors import InvalidArgumentError

CONFIG = replace(EVEN, tie_word_embeddings=False)
PROMPT = random_tokens(CONFIG, 300, seed=5)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return LoadedModel(CONFIG, random_weights(CONFIG))


def make(model, **options):
    return Engine(model, **{"num_blocks": 40, "kv_cache_dtype": "fp8_e4m3", "deterministic": True, **options})


def ask(engine, prompt, **options):
    """The tokens, and the logits of the first of them."""
    logits, run = [], engine.runner.run

    def run_and_record(chunks):
        found = run(chunks)
        logits.extend(row.clone() for row in found)
        return found

    engine.runner.run = run_and_record
    completions = engine.generate([prompt], max_tokens=6, ignore_eos=True, **options)
    del engine.runner.run
    engine.manager.check()
    return completions, logits[0]


def settle(engine):
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("config", [CONFIG, ODD, GEMMA3], ids=["even", "odd", "windows and softcaps"])
def test_bits_are_the_same_cached_and_cut_into_chunks(config):
    model = LoadedModel(config, random_weights(config))
    prompt = random_tokens(config, 200, seed=3)
    engine = make(model, num_blocks=100)
    (first,), logits = ask(engine, prompt)
    (again,), from_cache = ask(engine, prompt)
    assert first.num_cached_tokens == 0 and again.num_cached_tokens >= 192
    engine = make(model, num_blocks=100)
    engine.limits = StepLimits(max_num_batched_tokens=37, max_num_seqs=4)
    (cut,), in_chunks = ask(engine, prompt)
    assert torch.equal(logits, from_cache) and torch.equal(logits, in_chunks)
    assert first.token_ids == again.token_ids == cut.token_ids


def test_samples_share_blocks_and_copy_the_one_that_they_write_to(model):
    engine = make(model)
    prompt = PROMPT[:40]  # the third block is half full, so each sample but one gets a copy of it
    shared = engine.generate([prompt], n=3, max_tokens=8, temperature=1.0, seed=7, ignore_eos=True)
    alone = make(model, enable_prefix_caching=False)
    expected = [alone.generate([prompt], n=3, max_tokens=8, temperature=1.0, seed=7, ignore_eos=True)][0]
    assert [one.token_ids for one in shared] == [one.token_ids for one in expected]
    assert len({tuple(one.token_ids) for one in shared}) > 1


def test_what_tiers_keep_has_the_same_bits(model, tmp_path):
    (computed,), logits = ask(make(model), PROMPT)
    with make(model, num_blocks=24, tiers=["host:4MiB", TierOptions(f"disk:{tmp_path}", "16MiB")]) as engine:
        ask(engine, PROMPT)
        settle(engine)
        ask(engine, random_tokens(CONFIG, 300, seed=9))  # which pushes the blocks out
        (from_host,), host_logits = ask(engine, PROMPT)
        assert from_host.num_loaded_tokens.get("host", 0) > 0
        settle(engine)
    with make(model, num_blocks=24, tiers=[TierOptions(f"disk:{tmp_path}", "16MiB")]) as engine:
        (from_disk,), disk_logits = ask(engine, PROMPT)
        assert from_disk.num_loaded_tokens == {"disk": 288}
    assert torch.equal(host_logits, logits) and torch.equal(disk_logits, logits)
    assert computed.token_ids == from_host.token_ids == from_disk.token_ids


def test_a_disk_of_another_dtype_or_of_other_scales_is_not_read(model, tmp_path, monkeypatch):
    with make(model, tiers=[TierOptions(f"disk:{tmp_path / 'first'}", "16MiB")]) as engine:
        ask(engine, PROMPT)
        settle(engine)
    found = calibrate(model)
    other = KVScales(tuple(2 * scales for scales in found.keys), found.values)
    with monkeypatch.context() as patch:
        patch.setattr("kvblocks.engine.run.backends.calibrate", lambda _model: other)
        with make(model, tiers=[TierOptions(f"disk:{tmp_path / 'other'}", "16MiB")]) as engine:
            assert not torch.equal(engine.runner.kv_cache.scales.keys[0], found.keys[0])
            ask(engine, PROMPT)
            settle(engine)
    for options, folder in (({"kv_cache_dtype": "auto"}, "first"), ({}, "other")):
        with make(model, tiers=[TierOptions(f"disk:{tmp_path / folder}", "16MiB")], **options) as engine:
            (completion,), _ = ask(engine, PROMPT)
            assert completion.num_loaded_tokens == {}


def test_it_is_as_close_as_4_bits_are_and_takes_a_quarter(model):
    plain, small = make(model, kv_cache_dtype="auto"), make(model, kv_cache_dtype="fp8")
    assert small.runner.kv_cache.memory[0].dtype == E4M3
    assert plain.plan.block_bytes == 4 * small.plan.block_bytes
    expected, got = ask(plain, PROMPT)[1], ask(small, PROMPT)[1]
    difference = (expected - got).norm() / expected.norm()
    assert 1e-4 < difference < 0.05
    kept = small.runner.kv_cache.keys[0][0].float() * small.runner.kv_cache.scales.keys[0][:, None]
    exact = plain.runner.kv_cache.keys[0][0]
    # Half of the last of 4 significant bits, and half of the smallest number there is.
    allowed = exact.abs() / 16 + small.runner.kv_cache.scales.keys[0][:, None] * 2**-10
    assert ((kept - exact).abs() <= allowed).all() and not torch.equal(kept, exact)


def test_scales_are_powers_of_2_with_room_above_what_was_seen():
    largest = [torch.tensor([0.0, 1e-20, 0.874, 0.876, 448.0, 3e9])]
    scales = KVScales.of_largest(largest, largest).keys[0]
    mantissa, _ = torch.frexp(scales)
    assert torch.equal(mantissa, torch.full_like(mantissa, 0.5)) and scales[0] == 1
    share = largest[0][1:] / scales[1:]
    assert (share <= 224).all() and (share >= 112).all()


def test_scales_are_those_of_each_head_and_the_same_every_time(model):
    first, again = calibrate(model), calibrate(model)
    assert str(first) == str(again)
    weights = model.weights
    qkv = weights.layers[1].qkv.clone()
    qkv[-64:] *= 8  # V of the last head
    louder = LoadedModel(CONFIG, replace(weights, layers=(weights.layers[0], replace(weights.layers[1], qkv=qkv))))
    changed = calibrate(louder)
    assert torch.equal(changed.values[1], 8 * first.values[1]) and torch.equal(changed.keys[1], first.keys[1])
    broken = LoadedModel(CONFIG, replace(weights, embedding=weights.embedding * torch.inf))
    with pytest.raises(ModelError, match="expected a model with finite keys and values, got infinity or NaN"):
        make(broken)


@pytest.mark.parametrize("name", ["fp8_e5m2", "bfloat16", "", None, 8, ["fp8"]])
def test_names_that_mean_nothing(model, name):
    with pytest.raises(InvalidArgumentError, match="kv_cache_dtype: expected one of auto, fp8, fp8_e4m3, got"):
        Engine(model, kv_cache_dtype=name)
