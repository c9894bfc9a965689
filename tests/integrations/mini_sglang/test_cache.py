"""The cache by itself, as mini-sglang's CacheManager calls it, and how it is registered."""

import os
import subprocess
import sys

import pytest
import torch

from integrations.mini_sglang.conftest import STAND_IN
from kvblocks import BlockStateError, InvalidArgumentError, StaleHitError, UnsupportedEngineError


def ids(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def pages(first, end):
    return torch.arange(first, end, dtype=torch.int32)


@pytest.fixture
def make(minisgl):
    def make_cache(page_size=1):
        minisgl.set_page_size(page_size)
        return minisgl.adapter.KVBlocksPrefixCache(torch.device("cpu"))

    return make_cache


def hold(cache, result):
    cache.lock_handle(result.handle)
    return result.handle


def test_what_was_inserted_is_found_to_the_token(make):
    cache = make()
    result = cache.insert_prefix(ids(1, 2, 3, 4), ids(9, 7, 5, 3))
    assert (result.cached_len, result.handle.cached_len) == (0, 4)
    handle = cache.match_prefix(ids(1, 2, 3, 9, 9)).cuda_handle
    assert handle.cached_len == 3
    assert handle.get_matched_indices().dtype == torch.int32
    assert handle.get_matched_indices().tolist() == [9, 7, 5]
    assert result.handle.get_matched_indices().tolist() == [9, 7, 5, 3]


def test_pages_of_several_tokens(make):
    cache = make(4)
    slots = torch.cat([pages(40, 44), pages(8, 12), pages(20, 24)])
    result = cache.insert_prefix(pages(0, 10), slots[:10])
    assert result.handle.cached_len == 8  # the tail stays its request's
    handle = cache.match_prefix(pages(0, 7)).cuda_handle
    assert handle.cached_len == 4
    assert handle.get_matched_indices().tolist() == [40, 41, 42, 43]
    assert cache.size_info == (8, 0)
    assert cache.evict(5).tolist() == [8, 9, 10, 11, 40, 41, 42, 43]


@pytest.mark.parametrize("page_size", [1, 4])
def test_nothing(make, page_size):
    cache = make(page_size)
    few = pages(0, page_size - 1)
    for handle in (cache.match_prefix(few).cuda_handle, cache.insert_prefix(few, few).handle):
        assert handle.cached_len == 0
        assert handle.get_matched_indices().tolist() == []
        cache.lock_handle(handle)
        cache.lock_handle(handle, unlock=True)
    assert cache.evict(0).dtype == torch.int32
    assert cache.size_info == (0, 0)


def test_what_is_locked_is_not_evicted(make):
    cache = make()
    held = hold(cache, cache.insert_prefix(ids(1, 2, 3), ids(0, 1, 2)))
    cache.insert_prefix(ids(1, 2, 9, 9), ids(0, 1, 5, 6))
    assert cache.size_info == (2, 3)
    with pytest.raises(InvalidArgumentError, match="expected at most 2 tokens, got 3"):
        cache.evict(3)
    assert sorted(cache.evict(2).tolist()) == [5, 6]
    cache.lock_handle(held, unlock=True)
    assert cache.size_info == (3, 0)
    assert sorted(cache.evict(3).tolist()) == [0, 1, 2]


def test_to_unlock_twice_is_refused(make):
    """mini-sglang does so when a prompt is aborted while its step runs, whether or not some of it was found."""
    cache = make()
    for held in (hold(cache, cache.insert_prefix(ids(1, 2), ids(0, 1))), cache.match_prefix(ids(5)).cuda_handle):
        cache.lock_handle(held)
        while held in vars(cache)["_locks"]:
            cache.lock_handle(held, unlock=True)
        with pytest.raises(BlockStateError, match=f"expected a handle that is locked, got one of {held.cached_len}"):
            cache.lock_handle(held, unlock=True)
    assert cache.size_info == (2, 0)
    cache.check_integrity()


def test_to_lock_what_has_gone_is_refused(make):
    cache = make()
    cache.insert_prefix(ids(1, 2), ids(0, 1))
    handle = cache.match_prefix(ids(1, 2)).cuda_handle
    cache.evict(1)
    with pytest.raises(StaleHitError):
        cache.lock_handle(handle)


def test_a_page_that_is_here_for_other_tokens_is_refused(make):
    cache = make()
    cache.insert_prefix(ids(1, 2), ids(0, 1))
    with pytest.raises(BlockStateError, match="expected ids that hold no other prefix, got 1"):
        cache.insert_prefix(ids(5, 6), ids(4, 1))
    cache.cache.check()


def two_requests(make):
    """Two requests that computed the same four tokens; the second one's pages are spares, and it goes on."""
    cache = make()
    first = hold(cache, cache.insert_prefix(ids(1, 2, 3, 4), pages(0, 4)))
    result = cache.insert_prefix(ids(1, 2, 3, 4), pages(10, 14))
    assert result.cached_len == 0  # the caller is to free none
    return cache, first, result.handle


def test_handles_of_one_length_are_different_ones(make):
    """mini-sglang's base of handles compares lengths, and the cache keeps handles in a dict."""
    _, first, second = two_requests(make)
    assert first.cached_len == second.cached_len
    assert len({first, second}) == 2


def test_spares_stay_while_their_request_goes_on(make):
    cache, first, second = two_requests(make)
    assert cache.size_info == (4, 4)
    cache.lock_handle(second)
    assert cache.size_info == (0, 8)
    with pytest.raises(InvalidArgumentError):
        cache.evict(1)
    cache.lock_handle(first, unlock=True)
    assert cache.size_info == (0, 8)
    cache.check_integrity()


def test_spares_are_evicted_first_when_it_has_ended(make):
    cache, first, second = two_requests(make)
    cache.lock_handle(second)
    end = cache.insert_prefix(ids(1, 2, 3, 4, 5), ids(10, 11, 12, 13, 14)).handle
    cache.check_integrity()
    cache.lock_handle(second, unlock=True)
    cache.lock_handle(first, unlock=True)
    assert cache.size_info == (9, 0)
    assert sorted(cache.evict(4).tolist()) == [10, 11, 12, 13]
    assert end.spares == {}
    assert sorted(cache.evict(5).tolist()) == [0, 1, 2, 3, 14]
    assert cache.size_info == (0, 0)
    cache.check_integrity()


def test_spares_go_along_when_a_request_is_inserted_again_and_goes_on(make):
    cache, _, second = two_requests(make)
    cache.lock_handle(second)
    again = hold(cache, cache.insert_prefix(ids(1, 2, 3, 4, 5), ids(10, 11, 12, 13, 14)))
    cache.lock_handle(second, unlock=True)
    assert cache.size_info == (0, 9)
    cache.lock_handle(again, unlock=True)
    assert cache.size_info == (5, 4)
    cache.check_integrity()


def test_a_spare_that_comes_back_for_other_tokens_is_refused(make):
    cache, _, second = two_requests(make)
    cache.lock_handle(second)
    with pytest.raises(BlockStateError, match=r"expected pages that nobody else has, got spares: \[12\]"):
        cache.insert_prefix(ids(7, 8), ids(30, 12))


def test_reset(make):
    cache, first, second = two_requests(make)
    with pytest.raises(BlockStateError):
        cache.reset()
    cache.lock_handle(first, unlock=True)
    assert cache.size_info == (8, 0)
    cache.reset()
    assert cache.size_info == (0, 0)
    assert second.spares == {}
    assert cache.match_prefix(ids(1, 2)).cuda_handle.cached_len == 0
    cache.check_integrity()


def test_an_insertion_counts_for_no_rate(make):
    cache = make()
    cache.insert_prefix(ids(1, 2, 3, 4), pages(0, 4))
    cache.match_prefix(ids(1, 2, 3, 4))
    assert cache.cache.stats.request_hit_rate == 1.0


def test_the_tokens_that_were_given_may_change(make):
    cache, tokens = make(), ids(1, 2, 3)
    handle = cache.insert_prefix(tokens, pages(0, 3)).handle
    tokens.zero_()
    cache.lock_handle(handle)
    assert cache.match_prefix(ids(1, 2, 3)).cuda_handle.cached_len == 3


def test_register_and_unregister(minisgl):
    types, adapter = minisgl.kvcache.SUPPORTED_CACHE_MANAGER, minisgl.adapter
    before = types.supported_names()
    adapter.register()
    adapter.register()
    assert types.supported_names() == [*before, "kvblocks"]
    made = minisgl.kvcache.create_prefix_cache(torch.device("cpu"), "kvblocks")
    assert type(made) is adapter.KVBlocksPrefixCache
    adapter.unregister()
    adapter.unregister()
    assert types.supported_names() == before


def test_a_name_that_is_taken_stays(minisgl):
    types, adapter = minisgl.kvcache.SUPPORTED_CACHE_MANAGER, minisgl.adapter
    types.register("mine")(dict)
    with pytest.raises(KeyError):
        adapter.register("mine")
    adapter.unregister("mine")
    assert types["mine"] is dict


def test_a_new_call_is_named(minisgl, monkeypatch):
    calls = minisgl.base.BasePrefixCache.__abstractmethods__
    monkeypatch.setattr(minisgl.base.BasePrefixCache, "__abstractmethods__", (calls | {"prefetch"}) - {"reset"})
    with pytest.raises(UnsupportedEngineError) as refused:
        minisgl.adapter.register()
    assert "BasePrefixCache.prefetch (unknown); BasePrefixCache.reset" in str(refused.value)
    assert "kvblocks" not in minisgl.kvcache.SUPPORTED_CACHE_MANAGER.supported_names()


def test_an_answer_with_other_fields_is_named(minisgl, monkeypatch):
    monkeypatch.setattr(minisgl.base, "InsertResult", tuple)
    with pytest.raises(UnsupportedEngineError, match=r"InsertResult\(cached_len, handle\)"):
        minisgl.adapter.check_mini_sglang()


def test_the_module_starts_a_server_whose_processes_know_it():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(STAND_IN), *sys.path])}
    command = [sys.executable, "-m", "kvblocks.integrations.mini_sglang", "--model", "some"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["arguments: --model some --cache-type kvblocks", "types: kvblocks"]
