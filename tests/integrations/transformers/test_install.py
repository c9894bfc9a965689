"""Installing and uninstalling, and errors that name what is unsupported."""

import sys
import types

import pytest
from transformers.generation.continuous_batching import cache as cache_module
from transformers.generation.continuous_batching import continuous_api, scheduler

from integrations.transformers.batching import IS_GROUPED, batching_config, generate, kvblocks_installed, make_prompts
from integrations.transformers.driver import Driver
from kvblocks import InvalidArgumentError, UnsupportedEngineError
from kvblocks.integrations.transformers import install, probe, uninstall

if IS_GROUPED:
    from transformers.generation.continuous_batching import cache_manager as allocators
else:
    from transformers.generation.continuous_batching import cache_allocators as allocators

only_groups = pytest.mark.skipif(not IS_GROUPED, reason="transformers 5.15 to 5.17")
only_sectors = pytest.mark.skipif(IS_GROUPED, reason="transformers 5.18 and newer")


def names():
    always = continuous_api.PagedAttentionCache, continuous_api.resolve_continuous_batching_config
    return *always, continuous_api.SCHEDULER_MAPPING, continuous_api.FIFOScheduler


def test_uninstall_puts_everything_back(llama, monkeypatch):
    before = names()
    first = install()
    assert names()[0] is first
    second = install(commit="late", debug=True)  # other options
    assert names()[0] is second is not first
    assert (second.commit, second.debug, first.commit, first.debug) == ("late", True, "early", False)
    uninstall()
    assert names() == before
    uninstall()  # twice does nothing
    assert names() == before
    run = generate(llama, make_prompts(1, 1)[:2], 50, monkeypatch, new=2)
    assert type(run.cache) is cache_module.PagedAttentionCache
    theirs = run.cache.group_cache_managers if IS_GROUPED else run.cache.cache_allocators.values()
    assert [type(allocator) for allocator in theirs] == [allocators.FullAttentionCacheAllocator]


def test_a_manager_that_runs_goes_on_after_uninstall(llama):
    prompt = make_prompts(2, 1)[0]
    with kvblocks_installed():
        driver = Driver(llama, 50)
    driver.add("0", prompt)
    assert len(driver.finish()["0"]) == 8
    assert driver.cache.manager.stats.num_taken_blocks > 0


def test_a_wrong_option_changes_nothing():
    before = names()
    with pytest.raises(InvalidArgumentError, match="'early' or 'late', got 'never'"):
        install(commit="never")
    assert names() == before


@pytest.mark.parametrize("space", [1.0, None])
def test_offloading_to_the_cpu_is_refused(llama, space):
    with kvblocks_installed(), pytest.raises(UnsupportedEngineError, match="cpu_offload_space"):
        llama.init_continuous_batching(continuous_batching_config=batching_config(50, cpu_offload_space=space))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "conv"),
        ({"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "granitemoehybrid", "layer_types": ["linear_attention"] * 2}, "linear_attention"),
    ],
)
def test_models_with_states_are_refused_by_name(llama, monkeypatch, fields, kind):
    """As transformers refuses them itself, but with the model's name. Their layers aren't where the config is from."""
    for name, value in fields.items():
        monkeypatch.setattr(llama.config, name, value, raising=False)
    with pytest.raises(ValueError, match=f"Invalid layer type: {kind}"):
        llama.init_continuous_batching(continuous_batching_config=batching_config(50))
    with kvblocks_installed(), pytest.raises(UnsupportedEngineError, match=f"{fields['model_type']}.* have {kind}"):
        llama.init_continuous_batching(continuous_batching_config=batching_config(50))


def test_tensor_parallelism_is_refused(llama, monkeypatch):
    with kvblocks_installed():
        manager = llama.init_continuous_batching(continuous_batching_config=batching_config(50))
        monkeypatch.setattr(manager, "distributed_helper", types.SimpleNamespace(tp_size=2))
        with pytest.raises(UnsupportedEngineError, match="tensor parallelism"):
            manager._create_batch_processor()


def test_two_requests_with_one_id_are_refused(llama):
    prompts = make_prompts(3, 2)
    with kvblocks_installed():
        driver = Driver(llama, 50)
        driver.add("0", prompts[0])
        driver.step()
        driver.add("0", prompts[1])
        with pytest.raises(UnsupportedEngineError, match="two requests with the id '0'"):
            driver.finish()


def test_what_kvblocks_does_not_have_says_so(llama):
    with kvblocks_installed():
        cache = Driver(llama, 50).cache
    blocks = cache._block_manager if IS_GROUPED else cache.pool
    with pytest.raises(UnsupportedEngineError, match=r"(pool|_block_manager)\.count_free_blocks"):
        blocks.count_free_blocks(0)


# The probe, with parts of transformers that have moved.


def test_the_installed_version_has_all_parts():
    assert probe.missing_parts() == []


def expect_missing(part):
    with pytest.raises(UnsupportedEngineError, match="in which differ: ") as caught:
        probe.check_transformers()
    assert part in str(caught.value)


def test_a_call_that_is_gone_is_named(monkeypatch):
    monkeypatch.delattr(cache_module.PagedAttentionCache, "search_prefix_match")
    expect_missing("PagedAttentionCache.search_prefix_match is gone")


def test_a_call_that_is_new_is_named(monkeypatch):
    monkeypatch.setattr(cache_module.PagedAttentionCache, "swap_blocks", lambda self: None, raising=False)
    expect_missing("PagedAttentionCache.swap_blocks (unknown)")


def test_a_parameter_that_is_new_is_named(monkeypatch):
    monkeypatch.setattr(cache_module.PagedAttentionCache, "search_prefix_match", lambda self, request_id, keep=0: None)
    expect_missing("expected PagedAttentionCache.search_prefix_match(request_id, prompt_ids), got (request_id, keep)")


@only_sectors
def test_another_order_of_writes_is_named(monkeypatch):
    sliding = allocators.SlidingAttentionCacheAllocator  # it reads first
    monkeypatch.setattr(allocators.FullAttentionCacheAllocator, "update", sliding.update)
    expect_missing("FullAttentionCacheAllocator.update")


@only_groups
def test_another_order_of_writes_in_groups_is_named(monkeypatch):
    sources = probe.inspect.getsource
    monkeypatch.setattr(probe.inspect, "getsource", lambda it: sources(it).replace("sliding_window == 1", "is_full"))
    expect_missing("PagedAttentionCache.update; PagedAttentionCache.update of windows")


@pytest.mark.parametrize(
    ("module", "old", "new", "named"),
    [
        ("scheduler", "self.cache.free_blocks(", "self.cache.drop_blocks(", "scheduler: cache.drop_blocks (unknown)"),
        pytest.param(
            *("scheduler", "pool.try_to_free_sectors", "pool.grow", "scheduler: cache.pool.grow (unknown)"),
            marks=only_sectors,
        ),
        pytest.param(
            *("offloading_manager", "allocator.block_table", "allocator.ledger"),
            "offloading_manager: cache.ledger (unknown)",
            marks=only_sectors,
        ),
        pytest.param(
            *("offloading_manager", "cm.block_table", "cm.ledger", "offloading_manager: cache.ledger (unknown)"),
            marks=only_groups,
        ),
    ],
)
def test_a_use_that_is_new_is_named(module, old, new, named, monkeypatch):
    sources = probe.inspect.getsource

    def doctored(thing):
        source = sources(thing)
        return source.replace(old, new) if getattr(thing, "__name__", "").endswith("." + module) else source

    monkeypatch.setattr(probe.inspect, "getsource", doctored)
    expect_missing(named)


def test_a_scheduler_that_may_drop_what_has_slots_is_named(monkeypatch):
    sources, call = probe.inspect.getsource, "            self._schedule_request("

    def doctored(thing):
        source = sources(thing)
        if thing is scheduler.Scheduler._process_candidates:
            assert call in source
            source = source.replace(call, "            if state.error:\n                continue\n" + call)
        return source

    monkeypatch.setattr(probe.inspect, "getsource", doctored)
    expect_missing("Scheduler._process_candidates")


def test_a_version_without_the_modules_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, allocators.__name__, None)
    monkeypatch.delattr(allocators.__name__)
    expect_missing("cache_allocators")


def test_a_part_that_cannot_even_be_looked_at_is_named(monkeypatch):
    monkeypatch.delattr(allocators, "SlidingAttentionCacheAllocator")
    expect_missing("no attribute 'SlidingAttentionCacheAllocator'")


def test_an_untested_version_gets_a_warning(monkeypatch):
    import transformers

    monkeypatch.setattr(transformers, "__version__", "5.99.0")
    with pytest.warns(UserWarning, match=r"not with 5\.99\.0; all parts that it uses are there"):
        probe.check_transformers()
