"""An engine with a host arena and a disk: the same bits, counted by tier, whatever fails, and after a restart."""

import errno
import gc
import logging
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine.small_models import EVEN, GEMMA3, QWEN3, WINDOW, converted, random_tokens, random_weights

from kvblocks import Sequence
from kvblocks.engine import Engine, LoadedModel, StepLimits
from kvblocks.engine.errors import ForgetError
from kvblocks.engine.tiers.block_bytes import BlockBytes
from kvblocks.engine.tiers.carrier import Carrier
from kvblocks.engine.tiers.options import TierOptions
from kvblocks.engine.tiers.places import DiskPlace, HostPlace
from kvblocks.errors import InvalidArgumentError, KVBlocksError
from kvblocks.tiers.disk import DiskError, DiskStore
from kvblocks.tiers.disk.folder import Folder

CONFIG = replace(EVEN, tie_word_embeddings=False)
NUM_BLOCKS = 24
NUM_PREFIX_TOKENS = 300  # of prompts that the disk takes at once

pytestmark = pytest.mark.usefixtures("loads_whatever_is_there")


@pytest.fixture(scope="module")
def model():
    return LoadedModel(CONFIG, random_weights(CONFIG))


@pytest.fixture
def make(model):
    """Engines that are closed in the end."""
    made = []

    def build(given=model, **options):
        torch.set_num_threads(1)
        options = {"num_blocks": NUM_BLOCKS, "deterministic": True, **options}
        made.append(Engine(given, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def on_disk(folder, size="64MiB", secret=None):
    return TierOptions(f"disk:{folder / 'kv'}", size, secret)


def prompts(number, seed=1):
    return [random_tokens(CONFIG, NUM_PREFIX_TOKENS, seed=seed + index) for index in range(number)]


def ask(engine, prompt, **options):
    """An answer, and the logits of its first token."""
    logits = []
    run = engine.runner.run

    def run_and_record(chunks):
        found = run(chunks)
        logits.extend(row.clone() for row in found)
        return found

    engine.runner.run = run_and_record
    try:
        (completion,) = engine.generate([prompt], max_tokens=6, ignore_eos=True, **options)
    finally:
        del engine.runner.run
    engine.manager.check()
    return completion, logits[0]


def settle(engine):
    while engine.has_work:
        engine.step()


def empty_device(engine):
    """Evict everything from the device, as other prompts would."""
    settle(engine)
    crowd = Sequence("crowd", range(NUM_BLOCKS * engine.manager.block_size))
    assert engine.manager.allocate_slots(crowd) is not None
    engine.manager.abort(crowd, 0)


def stats(engine, name):
    return next(tier for tier in engine.manager.tiers if tier.name == name)


# --- the same bits ---------------------------------------------------------------------------------------------------


def test_a_prefix_from_the_host_gives_the_logits_of_a_computed_one(make):
    (prompt,) = prompts(1)
    plain, expected = ask(make(), prompt)
    engine = make(tiers=["host:4MiB"])
    first, _ = ask(engine, prompt)
    empty_device(engine)
    second, logits = ask(engine, prompt)
    assert first.token_ids == second.token_ids == plain.token_ids
    assert torch.equal(logits, expected)
    assert (second.num_cached_tokens, second.num_loaded_tokens) == (288, {"host": 288})
    assert second.num_computed_tokens == first.num_computed_tokens - 288
    assert first.num_loaded_tokens == {}


@pytest.mark.parametrize("secret", [None, b"a secret of sixteen or more"])
def test_after_a_restart_the_first_answer_comes_from_the_disk(make, tmp_path, secret):
    (prompt,) = prompts(1)
    options = {"tiers": [on_disk(tmp_path, secret=secret)]}
    with make(**options) as engine:
        first, expected = ask(engine, prompt)
    second, logits = ask(make(**options), prompt)
    assert second.token_ids == first.token_ids
    assert torch.equal(logits, expected)
    assert (second.num_cached_tokens, second.num_loaded_tokens) == (288, {"disk": 288})


def test_what_the_host_has_is_not_loaded_from_the_disk(make, tmp_path):
    (prompt,) = prompts(1)
    engine = make(tiers=["host:4MiB", on_disk(tmp_path)])
    ask(engine, prompt)
    empty_device(engine)
    again, _ = ask(engine, prompt)
    assert again.num_loaded_tokens == {"host": 288}
    assert stats(engine, "disk").num_cached_blocks == 19  # with what was generated


def test_many_at_once_over_a_small_pool_get_what_they_get_alone(make, tmp_path):
    """Loads, preemptions and stores at the same time, in an engine that has room for a few of them."""
    chooser = random.Random(5)
    shared = prompts(4)
    asked = [shared[chooser.randrange(4)] + random_tokens(CONFIG, 1 + number % 20, seed=number) for number in range(20)]
    expected = [
        make(num_blocks=60, enable_prefix_caching=False).generate([p], max_tokens=8)[0].token_ids for p in asked
    ]
    engine = make(num_blocks=50, tiers=[f"host:{40 * 16384}", on_disk(tmp_path)])
    engine.limits = StepLimits(64, 8)
    completions = engine.generate(asked, max_tokens=8)
    assert [completion.token_ids for completion in completions] == expected
    settle(engine)
    again = engine.generate(asked[::-1], max_tokens=8)
    assert [completion.token_ids for completion in again] == expected[::-1]
    settle(engine)
    engine.manager.check()
    assert engine.manager.num_free_blocks == 50
    assert sum(tier.num_loaded_blocks for tier in engine.manager.tiers) > 50
    for completion in (*completions, *again):
        assert sum(completion.num_loaded_tokens.values()) <= completion.num_cached_tokens


def test_salts_stay_apart_in_every_tier(make, tmp_path):
    (prompt,) = prompts(1)
    options = {"tiers": ["host:4MiB", on_disk(tmp_path)]}
    with make(**options) as engine:
        ask(engine, prompt, salt="ann")
        empty_device(engine)
        other, _ = ask(engine, prompt, salt="bob")
        assert other.num_cached_tokens == 0
    engine = make(**options)
    assert ask(engine, prompt)[0].num_cached_tokens == 0
    assert ask(engine, prompt, salt="ann")[0].num_loaded_tokens == {"disk": 288}


# --- another model, another engine ------------------------------------------------------------------------------------

OTHERS = {
    "weights": lambda model, at: {"given": LoadedModel(CONFIG, random_weights(CONFIG, seed=1))},
    "one weight": lambda model, at: {"given": LoadedModel(CONFIG, with_one_changed(model.weights))},
    "rope": lambda model, at: {
        "given": LoadedModel(replace(CONFIG, rope=replace(CONFIG.rope, theta=123.0)), model.weights)
    },
    "dtype": lambda model, at: {"given": LoadedModel(CONFIG, in_bfloat16(model.weights)), "deterministic": False},
    "block size": lambda model, at: {"block_size": 32},
    "not deterministic": lambda model, at: {"deterministic": False},
    "secret": lambda model, at: {"tiers": [on_disk(at, secret=b"a secret of sixteen or more")]},
}


def with_one_changed(weights):
    layers = list(weights.layers)
    down = layers[1].down.clone()
    down[3, 5] += 1e-3
    layers[1] = replace(layers[1], down=down)
    return replace(weights, layers=tuple(layers))


def in_bfloat16(weights):
    return converted(weights, torch.bfloat16)


@pytest.mark.parametrize("other", OTHERS)
def test_what_another_engine_stored_is_not_found(make, model, tmp_path, other):
    (prompt,) = prompts(1)
    options = {"tiers": [on_disk(tmp_path)]}
    with make(**options) as engine:
        ask(engine, prompt)
    changed = make(**{**options, **OTHERS[other](model, tmp_path)})
    assert ask(changed, prompt)[0].num_cached_tokens == 0
    assert stats(changed, "disk").num_loaded_blocks == 0


def test_the_same_model_loaded_again_finds_it(make, tmp_path):
    (prompt,) = prompts(1)
    options = {"tiers": [on_disk(tmp_path)]}
    with make(**options) as engine:
        ask(engine, prompt)
    again = make(LoadedModel(CONFIG, random_weights(CONFIG)), **options)
    assert ask(again, prompt)[0].num_loaded_tokens == {"disk": 288}


# --- what fails ------------------------------------------------------------------------------------------------------


def test_a_load_that_fails_is_computed_and_logged(make, monkeypatch, caplog):
    (prompt,) = prompts(1)
    engine = make(tiers=["host:4MiB"])
    _, expected = ask(engine, prompt)
    empty_device(engine)

    def fail(self, *given):
        raise OSError("the arena is gone")

    monkeypatch.setattr(HostPlace, "load", fail)
    with caplog.at_level(logging.ERROR, "kvblocks.engine.tiers"):
        second, logits = ask(engine, prompt)
    assert torch.equal(logits, expected)
    assert (second.num_cached_tokens, second.num_loaded_tokens) == (0, {"host": 0})
    assert "a load of 18 blocks failed in tier 'host'" in caplog.text
    assert stats(engine, "host").num_failed_blocks == 18


def test_a_store_that_fails_costs_a_hit_and_nothing_else(make, tmp_path, monkeypatch):
    (prompt,) = prompts(1)

    def fail(self, *given):
        raise DiskError("expected room on the disk, got none")

    monkeypatch.setattr(DiskPlace, "store", fail)
    engine = make(tiers=[on_disk(tmp_path)])
    _, expected = ask(engine, prompt)
    settle(engine)
    assert stats(engine, "disk").num_failed_blocks == 3  # a share of the pool; the rest isn't tried
    assert stats(engine, "disk").num_cached_blocks == 0
    second, logits = ask(engine, prompt)
    assert torch.equal(logits, expected)
    assert (second.num_cached_tokens, second.num_loaded_tokens) == (288, {})


def test_damaged_files_are_misses(make, tmp_path):
    asked = prompts(2)
    options = {"tiers": [on_disk(tmp_path)]}
    with make(**options) as engine:
        expected = [ask(engine, prompt) for prompt in asked]
    arena = max((tmp_path / "kv").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(arena.read_bytes())
    chooser = random.Random(1)
    for _ in range(30):
        content[chooser.randrange(len(content))] ^= 1 << chooser.randrange(8)
    arena.write_bytes(content)
    engine = make(**options)
    for prompt, (first, logits) in zip(asked, expected, strict=True):
        again, found = ask(engine, prompt)
        assert torch.equal(found, logits)
        assert again.token_ids == first.token_ids


def test_a_reset_reaches_the_disk(make, tmp_path):
    (prompt,) = prompts(1)
    options = {"tiers": [on_disk(tmp_path)]}
    with make(**options) as engine:
        ask(engine, prompt)
        settle(engine)
        engine.manager.reset_prefix_cache()
    assert ask(make(**options), prompt)[0].num_cached_tokens == 0


@pytest.mark.parametrize("settles", [True, False], ids=["stored", "being stored"])
def test_a_tenants_data_is_deleted_from_the_disk_too(make, tmp_path, settles):
    ann, bob = prompts(2)
    options = {"tiers": [on_disk(tmp_path)], "num_blocks": 60}
    engine = make(**options)
    ask(engine, bob, salt="bob")
    engine.generate([ann], max_tokens=1, salt="ann")
    if settles:
        settle(engine)
    rows = BlockBytes(engine.runner.kv_cache)
    probe = engine.manager.get_computed_blocks(Sequence("probe", ann, salt="ann"))
    held = [rows.rows_of([block.block_id])[0].tobytes() for block in probe.blocks]
    assert len(held) == 18
    assert engine.forget_salt("ann") == (36 if settles else 18), "what is being stored is not counted"
    assert ask(engine, ann, salt="ann")[0].num_cached_tokens == 0
    engine.forget_salt("ann")
    engine.close()
    content = b"".join(path.read_bytes() for path in (tmp_path / "kv").iterdir())
    assert not any(block in content for block in held)
    assert not any(np.array(ann[at : at + 16], "<u4").tobytes() in content for at in range(0, 288, 16))
    again = make(**options)
    assert ask(again, ann, salt="ann")[0].num_cached_tokens == 0
    assert ask(again, bob, salt="bob")[0].num_loaded_tokens == {"disk": 288}


@pytest.mark.parametrize("how", ["reset", "a failed store"])
def test_what_was_forgotten_otherwise_is_overwritten_as_well(make, tmp_path, monkeypatch, how):
    (ann,) = prompts(1)
    options = {"tiers": [on_disk(tmp_path)], "num_blocks": 60}
    engine = make(**options)
    if how == "a failed store":
        store = DiskPlace.store
        monkeypatch.setattr(DiskPlace, "store", lambda *given: store(*given) and False)
    ask(engine, ann, salt="ann")
    settle(engine)
    if how == "reset":
        engine.manager.reset_prefix_cache()
    engine.forget_salt("ann")
    content = b"".join(path.read_bytes() for path in (tmp_path / "kv").iterdir())
    assert not any(np.array(ann[at : at + 16], "<u4").tobytes() in content for at in range(0, 288, 16))


def test_a_disk_that_cannot_be_overwritten_is_told_of(make, tmp_path, monkeypatch):
    (ann,) = prompts(1)
    engine = make(tiers=[on_disk(tmp_path)], num_blocks=60)
    ask(engine, ann, salt="ann")
    settle(engine)

    def fail(self, salt, slots, timeout_s):
        raise DiskError("expected a disk that can be written, got none")

    with monkeypatch.context() as patched:
        patched.setattr(DiskPlace, "forget", fail)
        with pytest.raises(ForgetError, match=r"disk: expected a disk that can be written, got none\. Try again"):
            engine.forget_salt("ann")
    assert engine.forget_salt("ann") == 0
    content = b"".join(path.read_bytes() for path in (tmp_path / "kv").iterdir())
    assert not any(np.array(ann[at : at + 16], "<u4").tobytes() in content for at in range(0, 288, 16))


def test_what_a_manager_forgets_leaves_an_idle_engines_disk(make, tmp_path):
    (ann,) = prompts(1)
    options = {"tiers": [on_disk(tmp_path)], "num_blocks": 60}
    engine = make(**options)
    ask(engine, ann, salt="ann")
    settle(engine)
    engine.manager.forget_salt("ann")
    assert engine.has_work
    settle(engine)
    assert not engine.has_work
    engine.close()
    assert ask(make(**options), ann, salt="ann")[0].num_cached_tokens == 0


def test_a_closed_engine_says_so(make):
    (prompt,) = prompts(1)
    engine = make(tiers=["host:4MiB"])
    ask(engine, prompt)
    engine.close()
    for call in (lambda: engine.generate([prompt]), engine.step, lambda: engine.forget_salt("a")):
        with pytest.raises(KVBlocksError, match="expected an engine that is open"):
            call()


@pytest.mark.parametrize("place", ["in schedule", "after schedule"])
def test_an_interrupt_while_a_step_is_scheduled_leaves_nothing_unwritten(make, tmp_path, monkeypatch, place):
    (prompt,) = prompts(1)
    _, expected = ask(make(), prompt)
    options = {"tiers": [on_disk(tmp_path)]}
    with make(**options) as engine:
        schedule = engine.scheduler.schedule

        def interrupted():
            chunks = schedule()
            assert chunks
            if place == "in schedule":
                raise KeyboardInterrupt
            monkeypatch.setattr(engine.runner, "run", interrupt)
            return chunks

        def interrupt(chunks):
            raise KeyboardInterrupt

        monkeypatch.setattr(engine.scheduler, "schedule", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([prompt], max_tokens=2)
        monkeypatch.undo()
        assert engine.manager.get_computed_blocks(Sequence("probe", prompt)).num_tokens == 0
        assert engine.manager.num_free_blocks == NUM_BLOCKS
        settle(engine)
    again, logits = ask(make(**options), prompt)
    assert (again.num_cached_tokens, again.num_loaded_tokens) == (0, {})
    assert torch.equal(logits, expected)


def test_a_refused_engine_leaves_another_models_folder_alone(make, tmp_path):
    (prompt,) = prompts(1)
    options = {"tiers": [on_disk(tmp_path)]}
    with make(**options) as engine:
        ask(engine, prompt)
    windows = replace(QWEN3, windows=(WINDOW, WINDOW))
    with pytest.raises(InvalidArgumentError, match="tiers: expected a group of full attention, got"):
        make(LoadedModel(windows, random_weights(windows)), **options)
    assert ask(make(**options), prompt)[0].num_loaded_tokens == {"disk": 288}


def test_a_salt_is_forgotten_without_tiers_as_well(make):
    (prompt,) = prompts(1)
    engine = make()
    ask(engine, prompt, salt="ann")
    assert engine.forget_salt("ann") == 19
    assert ask(engine, prompt, salt="ann")[0].num_cached_tokens == 0


def test_a_step_that_dies_leaves_nothing_of_it_on_the_disk(make, tmp_path, monkeypatch):
    (prompt,) = prompts(1)
    options = {"tiers": [on_disk(tmp_path)]}
    _, expected = ask(make(), prompt)
    engine = make(**options)
    engine.limits = StepLimits(160, 8)
    run, calls = engine.runner.run, []

    def die_in_the_second(chunks):
        calls.append(chunks)
        if len(calls) == 2:
            for tensor in engine.runner.kv_cache.memory:
                tensor[chunks[0].request.sequence.block_ids[-1]] = torch.nan
            raise RuntimeError("the step died")
        return run(chunks)

    engine.runner.run = die_in_the_second
    with pytest.raises(RuntimeError, match="the step died"):
        engine.generate([prompt], max_tokens=2)
    engine.close()
    again, logits = ask(make(**options), prompt)
    assert torch.equal(logits, expected)
    assert again.num_cached_tokens <= 160


# --- the life of an engine -------------------------------------------------------------------------------------------


def test_closing_stores_what_waits_for_it(make, tmp_path):
    asked = prompts(3)
    options = {"tiers": [on_disk(tmp_path)], "num_blocks": 80}
    engine = make(**options)
    engine.generate(asked, max_tokens=1)
    engine.close()
    engine.close()
    assert stats(make(**options), "disk").num_cached_blocks == 3 * 18


def test_closing_without_time_keeps_what_is_there(make, tmp_path):
    asked = prompts(3)
    options = {"tiers": [on_disk(tmp_path)], "num_blocks": 80}
    engine = make(**options)
    engine.generate(asked, max_tokens=1)
    engine.close(0.0)
    restarted = make(**options)
    for prompt in asked:
        assert ask(restarted, prompt)[0].num_cached_tokens in range(0, 289, 16)


def test_an_engine_that_cannot_be_made_gives_the_folder_back(make, model, tmp_path):
    options = {"tiers": [on_disk(tmp_path)]}
    with pytest.raises(KVBlocksError, match="enable_caching"):
        make(enable_prefix_caching=False, **options)
    make(**options)


def test_a_disk_of_somebody_else_is_refused(make, tmp_path):
    options = {"tiers": [on_disk(tmp_path)]}
    make(**options)
    with pytest.raises(DiskError, match="expected"):
        make(**options)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("host:0", {}, "tiers: host: expected bytes"),
        ("host:2 potatoes", {}, "tiers: host: expected bytes"),
        ("host:1.5", {}, "tiers: host: expected bytes"),
        ("host:4MiB", {"size": "1GiB"}, "tiers: host: expected no size, got '1GiB'"),
        ("host:4MiB", {"secret": b"x" * 16}, "tiers: host: expected no secret, got one"),
        ("host:100", {}, r"tiers: host: expected at least \d+ bytes, a block, and at most \d+, .* got 100"),
        ("host:9999TB", {}, r"tiers: host: expected at least \d+ bytes, a block, and at most \d+, which are free"),
        ("disk:", {}, "tiers: disk: expected a folder after the colon, got ''"),
        ("disk:kv", {"size": 0.5}, "tiers: disk: size: expected bytes"),
        ("disk:kv", {"size": "much"}, "tiers: disk: size: expected bytes"),
        ("disk:kv", {"secret": "text"}, "tiers: disk: secret: expected at least 16 bytes, got str"),
        ("disk:kv", {"secret": b""}, "tiers: disk: secret: expected at least 16 bytes, got 0"),
        ("disk:kv", {"secret": b"short"}, "expected at least 16 bytes, got 5"),
        ("disk:kv", {"size": 1000}, "expected at least"),
        ("kv", {}, "tiers: expected 'SCHEME:ADDRESS', such as 'host:2GiB', got another text"),
        (7, {}, "tiers: expected 'SCHEME:ADDRESS', such as 'host:2GiB', got int"),
        (
            "tape:kv",
            {},
            "tiers: expected a URL with one of the schemes host, disk, valkey, .*; got another",
        ),
    ],
)
def test_what_is_wrong_with_options_is_said(make, tmp_path, monkeypatch, url, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match=message):
        make(tiers=[TierOptions(url, **options)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tiers", ["valkey://ann:hidden@host", 7, [7], ["hidden"], ["hidden:word@host"]])
def test_what_is_no_list_of_tiers_is_refused_and_not_shown(make, tiers):
    with pytest.raises(InvalidArgumentError, match="tiers: expected") as raised:
        make(tiers=tiers)
    assert "hidden" not in str(raised.value)


# --- models with windows ---------------------------------------------------------------------------------------------

WINDOWED = {"gemma3": replace(GEMMA3, tie_word_embeddings=False), "qwen3": QWEN3}


@pytest.fixture(scope="module", params=WINDOWED)
def windowed(request):
    return LoadedModel(WINDOWED[request.param], random_weights(WINDOWED[request.param]))


def test_windows_come_from_the_host_too(make, windowed):
    prompt = random_tokens(windowed.config, 200, seed=5)
    engine = make(windowed, num_blocks=70, tiers=["host:4MiB"])
    first, expected = ask(engine, prompt)
    settle(engine)
    for seed in range(6):
        engine.generate([random_tokens(windowed.config, 230, seed=10 + seed)], max_tokens=1)
    settle(engine)
    second, logits = ask(engine, prompt)
    assert torch.equal(logits, expected)
    assert second.token_ids == first.token_ids
    assert (second.num_cached_tokens, second.num_loaded_tokens) == (192, {"host": 192})


def test_many_prompts_over_windows_and_a_host_get_what_they_get_alone(make, windowed):
    chooser = random.Random(6)
    shared = [random_tokens(windowed.config, 100, seed=seed) for seed in range(4)]
    asked = [
        shared[chooser.randrange(4)][: chooser.choice([50, 97, 100])]
        + random_tokens(windowed.config, number, seed=number)
        for number in range(1, 17)
    ]
    plain = make(windowed, num_blocks=150, enable_prefix_caching=False)
    expected = [plain.generate([prompt], max_tokens=6)[0].token_ids for prompt in asked]
    num_blocks = 15 * len(plain.manager.groups)
    engine = make(windowed, num_blocks=num_blocks, tiers=["host:4MiB"])
    engine.limits = StepLimits(48, 6)
    for _ in range(3):
        completions = engine.generate(asked, max_tokens=6)
        assert [completion.token_ids for completion in completions] == expected
        settle(engine)
        engine.manager.check()
    assert engine.manager.num_free_blocks == num_blocks
    assert stats(engine, "host").num_loaded_blocks > 20


@pytest.mark.parametrize("secret", [None, b"a secret of sixteen or more"])
def test_windows_come_from_the_disk_after_a_restart(make, windowed, tmp_path, secret):
    prompt = random_tokens(windowed.config, 290, seed=5)
    options = {
        "tiers": [on_disk(tmp_path, secret=secret)],
        "num_blocks": 100,
    }
    plain, expected = ask(make(windowed, num_blocks=100, enable_prefix_caching=False), prompt)
    with make(windowed, **options) as engine:
        ask(engine, prompt)
    again, logits = ask(make(windowed, **options), prompt)
    assert torch.equal(logits, expected)
    assert again.token_ids == plain.token_ids
    assert (again.num_cached_tokens, again.num_loaded_tokens) == (288, {"disk": 288})


def test_what_prompts_begin_with_is_there_after_a_restart(make, windowed, tmp_path):
    """Blocks are stored up to where two prompts part, with the windows that the next prompt sees there."""
    shared = random_tokens(windowed.config, 272, seed=5)
    asked = [shared + random_tokens(windowed.config, 20, seed=seed) for seed in range(3)]
    options = {"tiers": [on_disk(tmp_path)], "num_blocks": 200}
    expected = [ask(make(windowed, num_blocks=200, enable_prefix_caching=False), prompt) for prompt in asked]
    with make(windowed, **options) as engine:
        for prompt in asked[:2]:
            ask(engine, prompt)
    again, logits = ask(make(windowed, **options), asked[2])
    assert torch.equal(logits, expected[2][1])
    assert again.token_ids == expected[2][0].token_ids
    assert again.num_loaded_tokens == {"disk": 272}


@pytest.mark.parametrize("is_damaged", [False, True])
def test_many_prompts_over_windows_and_restarts_get_what_they_get_alone(make, windowed, tmp_path, is_damaged):
    chooser = random.Random(7)
    shared = [random_tokens(windowed.config, 290, seed=seed) for seed in range(3)]
    asked = [
        shared[chooser.randrange(3)][: chooser.choice([128, 289, 290])] + random_tokens(windowed.config, n, seed=n)
        for n in range(1, 9)
    ]
    plain = make(windowed, num_blocks=300, enable_prefix_caching=False)
    expected = [plain.generate([prompt], max_tokens=4)[0].token_ids for prompt in asked]
    num_blocks = 40 * len(plain.manager.groups)
    options = {
        "tiers": ["host:300KiB", on_disk(tmp_path, "4MiB")],
        "num_blocks": num_blocks,
    }
    num_loaded = 0
    for _ in range(3):
        with make(windowed, **options) as engine:
            engine.limits = StepLimits(96, 6)
            completions = engine.generate(asked, max_tokens=4)
            assert [completion.token_ids for completion in completions] == expected
            settle(engine)
            engine.manager.check()
            assert engine.manager.num_free_blocks == num_blocks
            num_loaded += stats(engine, "disk").num_loaded_blocks
        if is_damaged:
            arena = max((tmp_path / "kv").iterdir(), key=lambda path: path.stat().st_size)
            content = bytearray(arena.read_bytes())
            for _ in range(10):
                content[chooser.randrange(len(content))] ^= 1 << chooser.randrange(8)
            arena.write_bytes(content)
    assert num_loaded > (0 if is_damaged else 20)  # damage costs hits, sometimes most of them


def test_another_window_is_another_model(make, tmp_path, caplog):
    options = {"tiers": [on_disk(tmp_path)], "num_blocks": 100}
    prompt = random_tokens(QWEN3, 290, seed=5)
    weights = random_weights(QWEN3)
    with make(LoadedModel(QWEN3, weights), **options) as engine:
        ask(engine, prompt)
    with caplog.at_level(logging.WARNING, "kvblocks.tiers.disk"):
        other = make(LoadedModel(replace(QWEN3, windows=(None, WINDOW + 1)), weights), **options)
    assert "kept for its return: expected fingerprint" in caplog.text
    assert ask(other, prompt)[0].num_cached_tokens == 0


# Six layers have a window, five have none. A block has room for six layers, so those of the five leave a part unused.
PADDED = replace(GEMMA3, num_layers=11, windows=((WINDOW, None) * 6)[:11], tie_word_embeddings=False)


def test_no_tenants_data_stays_on_the_disk_beside_another_ones(make, tmp_path):
    model = LoadedModel(PADDED, random_weights(PADDED))
    options = {"tiers": [on_disk(tmp_path)], "num_blocks": 42}
    engine = make(model, **options)
    assert [len(layers) for layers in engine.plan.group_layers] == [6, 5]
    ann, bob = (random_tokens(PADDED, 290, seed=seed) for seed in (1, 2))
    _, expected = ask(engine, bob, salt="bob")
    engine.generate([ann], max_tokens=6, ignore_eos=True, salt="ann")
    settle(engine)
    rows = BlockBytes(engine.runner.kv_cache)
    probe = engine.manager.get_computed_blocks(Sequence("probe", ann, salt="ann"))
    held = [block.block_id for group in range(2) for block in probe.group_blocks(group) if block is not None]
    parts = {part.tobytes() for row in rows.rows_of(held) for part in row.reshape(12, -1) if part.any()}
    assert len(parts) > 200
    for seed in range(3, 6):
        engine.generate([random_tokens(PADDED, 290, seed=seed)], max_tokens=6, ignore_eos=True, salt="bob")
        settle(engine)
    engine.forget_salt("ann")
    engine.close()
    content = b"".join(path.read_bytes() for path in (tmp_path / "kv").iterdir())
    assert not any(part in content for part in parts)
    again, logits = ask(make(model, **options), bob, salt="bob")
    assert again.num_loaded_tokens == {"disk": 288}
    assert torch.equal(logits, expected)


# --- Python's collector ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("was_enabled", [False, True])
def test_the_collector_is_left_as_it_was(make, tmp_path, monkeypatch, was_enabled, fails):
    seen = []

    def remembered(self):
        seen.append(gc.isenabled())
        if fails:
            raise DiskError("expected a disk that can be read, got none")
        return []

    monkeypatch.setattr(DiskStore, "remembered", remembered)
    options = {"tiers": [on_disk(tmp_path)]}
    if not was_enabled:
        gc.disable()
    try:
        if fails:
            with pytest.raises(DiskError, match="expected a disk that can be read"):
                make(**options)
        else:
            make(**options)
        assert (seen, gc.isenabled()) == ([False], was_enabled)
    finally:
        gc.enable()


# --- deleting beside the engine's steps ------------------------------------------------------------------------------


@pytest.fixture
def hanging(make, monkeypatch):  # ends before the engines do
    """Have a call of the disk's place hang: returns events, of its beginning and of what it waits for."""
    events = []

    def hang(name):
        has_begun, may_end, call = threading.Event(), threading.Event(), getattr(DiskPlace, name)
        events.append(may_end)

        def wait_and_call(self, *given):
            has_begun.set()
            assert may_end.wait(60)
            return call(self, *given)

        monkeypatch.setattr(DiskPlace, name, wait_and_call)
        return has_begun, may_end

    yield hang
    for event in events:
        event.set()


def test_others_are_served_while_a_salt_is_deleted(make, tmp_path, hanging):
    ann, bob = prompts(2)
    engine = make(tiers=[on_disk(tmp_path)])
    for prompt, salt in ((ann, "ann"), (bob, "bob")):
        ask(engine, prompt, salt=salt)
        settle(engine)
    empty_device(engine)
    has_begun, may_end = hanging("forget")
    forgetting = engine.begin_forgetting("ann")
    assert has_begun.wait(60) and not forgetting.wait(0)
    assert ask(engine, bob, salt="bob")[0].num_loaded_tokens == {"disk": 288}, "a load doesn't wait for it either"
    assert ask(engine, ann, salt="ann")[0].num_cached_tokens == 0
    with pytest.raises(ForgetError, match="disk: the deletion has not ended yet, and goes on"):
        forgetting.check()
    may_end.set()
    assert forgetting.wait(60)
    forgetting.check()
    assert forgetting.num_blocks == 19, "all of them on the disk"


def test_what_a_transfer_holds_is_deleted_when_it_has_ended(make, tmp_path, hanging):
    (ann,) = prompts(1)
    engine = make(tiers=[on_disk(tmp_path)], num_blocks=60)
    has_begun, may_end = hanging("store")
    ask(engine, ann, salt="ann")
    engine.step()
    assert has_begun.wait(60)
    forgetting = engine.begin_forgetting("ann")
    may_end.set()
    settle(engine)
    assert forgetting.wait(60)
    forgetting.check()
    content = b"".join(path.read_bytes() for path in (tmp_path / "kv").iterdir())
    assert not any(np.array(ann[at : at + 16], "<u4").tobytes() in content for at in range(0, 288, 16))


def test_a_deletion_that_an_engines_end_cuts_off_says_so(make, tmp_path, hanging, monkeypatch):
    (ann,) = prompts(1)
    engine = make(tiers=[on_disk(tmp_path)], num_blocks=60)
    has_begun, may_end = hanging("store")
    ask(engine, ann, salt="ann")
    engine.step()
    assert has_begun.wait(60)
    forgetting = engine.begin_forgetting("ann")
    close = Carrier.close

    def go_on_and_close(carrier, **options):
        may_end.set()
        close(carrier, **options)

    monkeypatch.setattr(Carrier, "close", go_on_and_close)
    engine.close(0.0)
    assert forgetting.wait(0)
    with pytest.raises(ForgetError, match="disk: expected an engine that stays open, got one that was closed"):
        forgetting.check()


def test_an_engine_whose_disk_is_full_serves_without_it(make, tmp_path, monkeypatch, caplog):
    (prompt,) = prompts(1)

    def refuse(self, *given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Folder, "write_marker", refuse)
    engine = make(tiers=[on_disk(tmp_path), "host:4MiB"])
    assert "disk: serving without a disk, since there is no room for it" in caplog.text
    assert [tier.name for tier in engine.manager.tiers] == ["host"]
    assert ask(engine, prompt)[0].token_ids == ask(make(), prompt)[0].token_ids
    engine.close()
    assert make(tiers=[on_disk(tmp_path)]).offload is None
    monkeypatch.undo()
    assert make(tiers=[on_disk(tmp_path)]).offload is not None


def test_after_a_restart_the_disk_knows_which_prompt_was_used_last(make, tmp_path):
    first, second = prompts(2)
    options = {"tiers": [on_disk(tmp_path)], "num_blocks": 60}
    with make(**options) as engine:
        for prompt in (first, second, first):
            ask(engine, prompt)
            settle(engine)
    with make(**options) as engine:
        ahead = [
            engine.manager.inspect.explain(Sequence("probe", one)).tiers[0].num_blocks_ahead for one in (first, second)
        ]
        assert ahead[0] > ahead[1]
