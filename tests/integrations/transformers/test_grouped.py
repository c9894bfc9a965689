"""The cache for transformers 5.15 to 5.17, in a stand-in whose parts have those versions' shape.

Each row that the stand-in's layers read is compared with what the request's own token has there.
"""

import importlib
import random
import sys
import types
from pathlib import Path

import pytest
import torch

from kvblocks import UnsupportedEngineError

STAND_IN = Path(__file__).parent / "stand_in"
NAMES = ("transformers", "kvblocks.integrations.transformers")
LAYERS = {"full": (None,), "mixed": (None, 20, 20), "sliding": (11,)}
PAGE = 8


def is_ours(name):
    return any(name == root or name.startswith(root + ".") for root in NAMES)


@pytest.fixture
def engine():
    """Modules by their names, with the stand-in as transformers: `api`, `install`, `probe` and what a test asks for."""
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if is_ours(name)}
    sys.path.insert(0, str(STAND_IN))
    try:
        package = importlib.import_module(NAMES[1])
        yield types.SimpleNamespace(
            install=package.install,
            uninstall=package.uninstall,
            probe=importlib.import_module(NAMES[1] + ".probe"),
            module=lambda name: importlib.import_module("transformers.generation.continuous_batching." + name),
        )
    finally:
        sys.path.remove(str(STAND_IN))
        for name in [name for name in sys.modules if is_ours(name)]:
            del sys.modules[name]
        sys.modules.update(saved)
        if NAMES[1] in saved:
            sys.modules["kvblocks.integrations"].transformers = saved[NAMES[1]]


@pytest.fixture
def patch(engine):
    """A monkeypatch that is undone before the stand-in goes."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def make_processor(engine, windows=(None,), num_blocks=100, commit="early", tp_size=1, **more):
    given = {
        "block_size": PAGE,
        "max_batch_tokens": 96,
        "max_blocks_per_request": 0,
        "allow_block_sharing": True,
        "use_async_batching": False,
        "safety_margin": None,
        "scheduler_type": "fifo",
        "cpu_offload_space": 0,
        **more,
    }
    engine.install(commit=commit, debug=True)
    try:
        return engine.module("continuous_api").ContinuousBatchProcessor(
            types.SimpleNamespace(windows=list(windows)),
            types.SimpleNamespace(num_blocks=num_blocks * len(windows), **given),
            types.SimpleNamespace(tp_size=tp_size),
        )
    finally:
        engine.uninstall()


def add(engine, processor, name, prompt, new=8, samples=1):
    state = engine.module("requests").RequestState(name, list(prompt), new, samples - 1)
    processor.scheduler.waiting_requests[name] = state


def step(processor):
    if not processor.prepare_next_batch():
        return False
    processor.compute()
    processor.update_batch()
    return True


def finish(processor):
    while step(processor):
        pass
    cache = processor.cache
    assert cache.records == {}
    assert cache.manager.num_free_blocks == cache.manager.num_blocks
    cache.manager.check()
    return processor.answers


def answer(prompt, new):
    tokens = list(prompt)
    for _ in range(new):
        tokens.append((sum(tokens) * 7 + len(tokens)) % 50)
    return tokens


def make_prompts(seed, number):
    source = random.Random(seed)
    prefixes = [[source.randrange(50) for _ in range(40)] for _ in range(3)]
    prompts = [
        source.choice(prefixes) + [source.randrange(50) for _ in range(source.randint(1, 24))] for _ in range(number)
    ]
    return [*prompts, prompts[0], prompts[0], prompts[1][:1], prompts[1][: 2 * PAGE]]


def test_the_parts_that_are_there_decide(engine):
    assert engine.probe.missing_parts() == []
    cache = make_processor(engine).cache
    assert type(cache).__mro__[1].__module__.endswith(".grouped_cache")


@pytest.mark.parametrize("commit", ["early", "late"])
@pytest.mark.parametrize("num_blocks", [100, 24])
@pytest.mark.parametrize("windows", LAYERS.values(), ids=LAYERS)
def test_each_reads_its_own_tokens(engine, windows, num_blocks, commit):
    processor = make_processor(engine, windows, num_blocks, commit)
    prompts = make_prompts(1, 12)
    for number, prompt in enumerate(prompts):
        add(engine, processor, number, prompt, 12)
    assert finish(processor) == {number: answer(prompt, 12) for number, prompt in enumerate(prompts)}
    assert processor.cache.manager.stats.num_hit_tokens > 0


@pytest.mark.every(5)
@pytest.mark.parametrize("windows", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("seed", range(12))
def test_a_random_history(engine, windows, seed):
    """Requests come and go, some with several samples, and steps die."""
    source = random.Random(seed)
    processor = make_processor(
        engine, windows, source.choice((22, 40, 100)), max_batch_tokens=source.choice((16, 40, 96))
    )
    prompts, sent = make_prompts(seed, 8), {}
    for number in range(40):
        if source.random() < 0.6:
            sent[f"{number}"] = source.choice(prompts), source.randint(1, 16)
            add(engine, processor, f"{number}", *sent[f"{number}"], samples=source.choice((1, 1, 3)))
        active = processor.scheduler.active_requests
        if active and source.random() < 0.2:
            processor.scheduler.finish_request(source.choice(list(active)))
        if source.random() < 0.1 and processor.prepare_next_batch():  # and then it dies
            processor.scheduler._requests_to_fork.clear()
            for name in list(active):
                processor.scheduler.finish_request(name)
        step(processor)
    for name, tokens in finish(processor).items():
        assert tokens == answer(*sent[name.partition("_")[0]])


def test_equal_prompts_of_one_step_are_computed_once(engine):
    counts = []
    for commit in ("early", "late"):
        processor = make_processor(engine, commit=commit, max_batch_tokens=200)
        for name in "ab":
            add(engine, processor, name, [7] * 50, 1)
        finish(processor)
        counts.append(processor.num_computed)
    assert counts == [52, 100]


def test_nothing_is_cached_without_block_sharing(engine):
    processor = make_processor(engine, allow_block_sharing=False)
    for name in "ab":
        add(engine, processor, name, [7] * 50, 3)
    assert finish(processor) == {name: answer([7] * 50, 3) for name in "ab"}
    assert processor.cache.manager.stats.num_cached_blocks == 0


def test_samples_share_the_prompt(engine):
    for length in range(2 * PAGE - 1, 3 * PAGE + 2):
        processor = make_processor(engine, num_blocks=60)
        add(engine, processor, "a", list(range(length)), 8, samples=4)
        step(processor)
        cache = processor.cache
        assert len(cache.records) == 4
        shared = (length - 1) // PAGE
        own = -(-(length + 1) // PAGE) - shared
        taken = cache.manager.num_blocks - cache.manager.num_free_blocks
        assert taken - shared - 3 * own in {0, 1}  # the source may have an unfilled block
        assert set(map(tuple, finish(processor).values())) == {tuple(answer(range(length), 8))}


def test_samples_for_which_there_is_no_room_wait(engine):
    processor = make_processor(engine, num_blocks=9)
    add(engine, processor, "a", list(range(40)), 8, samples=6)
    step(processor)
    assert 1 < len(processor.cache.records) < 6
    assert len(finish(processor)) == 6


def test_what_warms_up_is_not_found(engine):
    processor = make_processor(engine, num_blocks=20)
    warm_up = engine.module("utils").create_warmup_future_states
    assert warm_up(processor.cache, "w", 21 * PAGE) is None
    assert warm_up(processor.cache, "w", 4 * PAGE + 1) is not None
    assert processor.cache.get_num_free_blocks() == 15
    processor.cache.free_blocks("w")
    add(engine, processor, "a", [0] * 40)
    finish(processor)
    assert processor.cache.manager.stats.num_hit_tokens == 0


def test_a_row_of_the_table_that_kernels_read(engine):
    processor = make_processor(engine, max_blocks_per_request=8)
    add(engine, processor, "a", list(range(20)))
    processor.prepare_next_batch()
    table = torch.full((1, 8), -1, dtype=torch.int32)
    processor.cache.fill_block_table("a", 0, 20, table)
    ids = processor.cache.records["a"].sequence.block_ids
    assert table[0].tolist() == [*ids, *[-1] * (8 - len(ids))]
    assert len(ids) == 3
    assert make_processor(engine, (None, 20), max_blocks_per_request=8).cache.max_blocks_per_request == 0


def test_mutants_are_found(engine):
    """Windows that are cached early, and forks that aren't copied: the comparison of the rows sees them."""
    processor = make_processor(engine, (None, 20))
    processor.cache.is_late = False
    for name in "ab":
        add(engine, processor, name, [7] * 40)
    with pytest.raises(AssertionError):
        finish(processor)
    processor = make_processor(engine)
    processor.cache.copy_cache = lambda *_blocks: None
    add(engine, processor, "a", list(range(20)), samples=3)
    with pytest.raises(AssertionError):
        finish(processor)


def test_what_is_not_served_says_so(engine):
    with pytest.raises(UnsupportedEngineError, match="tensor parallelism"):
        make_processor(engine, tp_size=2)
    with pytest.raises(UnsupportedEngineError, match="cpu_offload_space=4"):
        make_processor(engine, cpu_offload_space=4)
    with pytest.raises(UnsupportedEngineError, match=r"_block_manager\.num_free_blocks"):
        make_processor(engine).cache._block_manager.num_free_blocks  # noqa: B018
    processor = make_processor(engine)
    add(engine, processor, "a", [1] * 20)
    step(processor)
    add(engine, processor, "a", [2] * 20)
    with pytest.raises(UnsupportedEngineError, match="two requests with the id 'a'"):
        finish(processor)


def test_uninstall_puts_everything_back(engine):
    api = engine.module("continuous_api")
    names = ("PagedAttentionCache", "resolve_continuous_batching_config", "SCHEDULER_MAPPING", "FIFOScheduler")
    before = [getattr(api, name) for name in names]
    engine.install()
    engine.install(commit="late")
    assert all(getattr(api, name) is not old for name, old in zip(names, before, strict=True))
    engine.uninstall()
    assert [getattr(api, name) for name in names] == before


# The probe, with parts that have moved.

CALLS = [
    ("cache", "PagedAttentionCache", "fork_request", None, "PagedAttentionCache.fork_request is gone"),
    ("cache", "PagedAttentionCache", "swap", lambda self: None, "PagedAttentionCache.swap (unknown)"),
    ("cache", "PagedAttentionCache", "blocks_in_use", lambda self: None, "blocks_in_use(request_id), got ()"),
    ("scheduler", "Scheduler", "_allocate_blocks_if_needed", None, "Scheduler._allocate_blocks_if_needed is gone"),
    ("requests", "FutureRequestState", "__init__", lambda self, state: None, "query_length), got (state)"),
    ("cache_manager", "FullAttentionCacheAllocator", "get_read_indices", None, "get_read_indices is gone"),
]
FULL_FIRST = "if sliding_window == 1:"
SOURCES = [
    ("scheduler", "cache.free_blocks(", "cache.drop(", "scheduler: cache.drop (unknown)"),
    ("scheduler", "self.cache.get_num", "self.cache._block_manager.num", "_block_manager.num_free_blocks (unknown)"),
    ("offloading_manager", "cm.block_table", "cm.ledger", "offloading_manager: cache.ledger (unknown)"),
    ("continuous_api", "self.cache.copy_cache", "self.cache.allocate_blocks", "cache.allocate_blocks (unknown)"),
    (
        "update",
        FULL_FIRST,
        "if sliding_window != 1:\n            pass\n        elif False:",
        "PagedAttentionCache.update",
    ),
    ("update", "self.sentinel_index", "-1", "PagedAttentionCache.update of windows"),
    ("_process_candidates", "            token_budget -=", "            continue\n", "Scheduler._process_candidates"),
    ("_process_candidates", "return scheduled_requests, ", "return 0, ", "'return scheduled_requests'"),
    ("_allocate_blocks_if_needed", "append((state, ", "append((0, ", "with 'self.starved_requests.append((state'"),
    ("update_batch", "future_state.complete_blocks", "0", "ContinuousBatchProcessor.update_batch"),
]


def expect_missing(engine, part):
    with pytest.raises(UnsupportedEngineError, match=r"got 5\.17\.0, in which differ: ") as caught:
        engine.probe.check_transformers()
    assert part in str(caught.value)


@pytest.mark.parametrize(("module", "owner", "name", "call", "named"), CALLS, ids=[call[2] for call in CALLS])
def test_a_call_that_differs_is_named(engine, patch, module, owner, name, call, named):
    found = getattr(engine.module(module), owner)
    if call is None:
        patch.delattr(found, name)
    else:
        patch.setattr(found, name, call, raising=False)
    expect_missing(engine, named)


@pytest.mark.parametrize(("name", "old", "new", "named"), SOURCES)
def test_code_that_differs_is_named(engine, patch, name, old, new, named):
    sources = engine.probe.inspect.getsource

    def doctored(thing):
        source = sources(thing)
        if thing.__name__.rpartition(".")[2] != name:
            return source
        assert old in source
        return source.replace(old, new)

    patch.setattr(engine.probe.inspect, "getsource", doctored)
    expect_missing(engine, named)


def test_a_version_with_neither_kind_of_allocators_is_named(engine, patch):
    gone = engine.module("cache_manager")
    patch.setitem(sys.modules, gone.__name__, None)
    patch.delattr(gone.__name__)
    expect_missing(engine, "cache_allocators")
