"""mini-sglang's scheduler over kvblocks: no request reads KV that was written for another one."""

from random import Random

import pytest

from integrations.mini_sglang.driver import Settings, answer, make_asks
from integrations.mini_sglang.faults import NUM_FAULTS, make_faults
from kvblocks import BlockStateError, KVBlocksError

SEEDS = range(5)
# pages, tokens a page: nothing is evicted; much is; all the time. The same with pages of four tokens.
SIZES = [(4000, 1), (200, 1), (140, 1), (1000, 4), (40, 4)]


@pytest.mark.parametrize(("num_pages", "page_size"), SIZES)
def test_nobody_reads_foreign_kv_and_no_page_is_lost(minisgl, num_pages, page_size):
    minisgl.adapter.register()
    settings = Settings(num_pages, page_size)
    num_found = 0
    for seed in SEEDS:
        asks = make_asks(seed)
        engine, cache = answer(minisgl.make_scheduler, settings, asks, "kvblocks")
        cache.cache.check()
        assert engine.foreign == set()
        assert len(engine.answers) == len(asks)
        num_found += sum(engine.found.values())
    assert num_found > 1000


@pytest.mark.parametrize("page_size", [1, 4])
def test_where_nothing_is_evicted_it_finds_what_the_radix_tree_finds(minisgl, page_size):
    minisgl.adapter.register()
    settings = Settings(4000, page_size)
    for seed in SEEDS if minisgl.is_real else ():
        asks = make_asks(seed)
        theirs, _ = answer(minisgl.make_scheduler, settings, asks, "radix")
        ours, _ = answer(minisgl.make_scheduler, settings, asks, "kvblocks")
        assert ours.found == theirs.found
        assert ours.answers == theirs.answers


def test_with_its_radix_tree_some_read_foreign_kv(minisgl):
    """Shows why spares are kept. If it fails, mini-sglang has been fixed: update docs/integrations/mini-sglang.md."""
    foreign = []
    for seed in SEEDS if minisgl.is_real else ():
        engine, _ = answer_anyhow(minisgl, Settings(200), make_asks(seed), "radix")
        foreign += engine.foreign
    assert foreign or not minisgl.is_real


def test_aborts_lead_to_no_foreign_read(minisgl):
    """mini-sglang releases a prompt twice that is aborted while its step runs: with kvblocks that is refused."""
    minisgl.adapter.register()
    for seed in range(30) if minisgl.is_real else ():
        engine, end = answer_anyhow(minisgl, Settings(200), make_asks(seed), "kvblocks", cancels=Random(seed))
        assert engine.foreign == set()
        assert not isinstance(end, Exception) or type(end) is BlockStateError


def answer_anyhow(minisgl, settings, asks, cache_type, **more):
    """`answer` without its final assertions."""
    seen = []

    def make(engine, *given):
        seen.append(engine)
        return minisgl.make_scheduler(engine, *given)

    try:
        return answer(make, settings, asks, cache_type, **more)
    except (KVBlocksError, AssertionError, RuntimeError) as error:
        return seen[0], error


@pytest.mark.parametrize("number", range(NUM_FAULTS))
def test_a_fault_is_noticed(minisgl, number):
    faults = make_faults(minisgl.adapter)
    assert len(faults) == NUM_FAULTS
    minisgl.kvcache.SUPPORTED_CACHE_MANAGER.register("faulty")(faults[number])
    for seed in SEEDS:
        asks = make_asks(seed)
        try:
            engine, cache = answer(minisgl.make_scheduler, Settings(140), asks, "faulty")
            cache.cache.check()
        except (KVBlocksError, AssertionError, RuntimeError):
            return
        if engine.foreign:
            return
    pytest.fail("nobody noticed")
