"""kvblocks' block manager by itself, and how it replaces nano-vllm's."""

import importlib
from types import ModuleType, SimpleNamespace

import pytest

from integrations.nano_vllm.faults import CachesABlockMore, CachesChunksToCome
from kvblocks import PoolExhaustedError, Sequence, UnsupportedEngineError
from kvblocks.integrations.nano_vllm import (
    KVBlocksBlockManager,
    KVBlocksEarlyBlockManager,
    check_nano_vllm,
    install,
    uninstall,
)

BOTH = [KVBlocksBlockManager, KVBlocksEarlyBlockManager]


@pytest.fixture
def make(nano):
    nano.Sequence.block_size = 4
    return lambda tokens: nano.Sequence([*tokens], SimpleNamespace(temperature=1.0, max_tokens=9, ignore_eos=True))


def start(manager, seq, num_scheduled=None):
    manager.allocate(seq, manager.can_allocate(seq))
    seq.num_scheduled_tokens = num_scheduled or len(seq) - seq.num_cached_tokens


def finish_step(manager, seq):
    manager.hash_blocks(seq)
    seq.num_cached_tokens += seq.num_scheduled_tokens
    seq.num_scheduled_tokens = 0


def others_find_what_is_computed(make, kind):
    """How many blocks a later prompt finds of 22 tokens, computed in chunks of 9 and 13: in and after each step."""
    manager, found = kind(20, 4), []
    first, second = make(range(22)), make([*range(22), 7, 7])
    start(manager, first, 9)
    found.append(manager.can_allocate(second))
    finish_step(manager, first)
    found.append(manager.can_allocate(second))
    first.num_scheduled_tokens = 13
    found.append(manager.can_allocate(second))
    finish_step(manager, first)
    found.append(manager.can_allocate(second))
    return found


def test_of_a_prompt_in_chunks_others_find_the_blocks_that_are_written(make):
    assert others_find_what_is_computed(make, KVBlocksBlockManager) == [0, 2, 2, 5]


def test_early_also_those_that_the_step_writes(make):
    assert others_find_what_is_computed(make, KVBlocksEarlyBlockManager) == [2, 2, 5, 5]


@pytest.mark.parametrize("fault", [CachesABlockMore, CachesChunksToCome])
def test_a_chunk_too_many_is_noticed(make, fault):
    """nano-vllm's scheduler admits nobody beside a prompt in chunks, so only these tests can."""
    found = others_find_what_is_computed(make, fault)
    assert found not in ([0, 2, 2, 5], [2, 2, 5, 5])


@pytest.mark.parametrize("kind", BOTH)
def test_a_refusal_changes_nothing(make, kind):
    manager = kind(4, 4)
    start(manager, make(range(12)))
    large = make(range(100, 120))
    assert manager.can_allocate(large) == -1
    assert manager.manager.num_free_blocks == 1
    with pytest.raises(PoolExhaustedError, match="expected room"):
        manager.allocate(large, 0)
    assert (large.block_table, manager.manager.num_free_blocks) == ([], 1)
    manager.manager.check()


@pytest.mark.parametrize("kind", BOTH)
def test_a_scheduler_may_take_less_than_was_found(make, kind):
    manager = kind(20, 4)
    first, second = make(range(18)), make(range(18))
    start(manager, first)
    finish_step(manager, first)
    assert manager.can_allocate(second) == 4
    manager.allocate(second, 1)
    assert second.num_cached_tokens == 4
    assert second.block_table[:1] == first.block_table[:1]
    assert not {*second.block_table[1:]} & {*first.block_table}


def test_pins_give_way_when_nobody_else_can(make):
    """Otherwise nano-vllm's scheduler would have nothing to do, and stop with an AssertionError."""
    manager = KVBlocksBlockManager(6, 4)
    first = make(range(12))
    start(manager, first)
    finish_step(manager, first)
    manager.deallocate(first)
    manager.manager.pins.pin([*range(12)], priority=50)
    assert manager.manager.num_free_blocks == 3
    large = make(range(50, 66))
    assert manager.can_allocate(large) == 0
    start(manager, large)
    finish_step(manager, large)
    while len(large) < 24:
        large.append_token(1)
        assert manager.can_append(large)
        manager.may_append(large)
    assert len(large.block_table) == 6
    assert manager.can_allocate(make(range(200, 208))) == -1  # somebody is there now, whose blocks will come back
    manager.manager.check()


def test_pins_that_never_give_way_are_named(make):
    manager = KVBlocksBlockManager(6, 4)
    first = make(range(12))
    start(manager, first)
    finish_step(manager, first)
    manager.deallocate(first)
    manager.manager.pins.pin([*range(12)], priority=100)
    large = make(range(50, 70))
    with pytest.raises(PoolExhaustedError):
        start(manager, large)
    assert manager.manager.last_refusal.is_due_to_pins


def test_what_kvblocks_has_is_one_call_away(make):
    manager = KVBlocksBlockManager(8, 4)
    first = make(range(10))
    start(manager, first)
    finish_step(manager, first)
    assert manager.manager.inspect.explain(Sequence("why", range(10))).num_cached_blocks == 2


@pytest.mark.parametrize(("early", "kind"), [(False, BOTH[0]), (True, BOTH[1])])
def test_install_replaces_one_name_and_uninstall_puts_it_back(nano, early, kind):
    install(early=early)
    assert nano.scheduler.BlockManager is kind
    install(early=early)  # again
    uninstall()
    assert nano.scheduler.BlockManager is nano.BlockManager
    uninstall()
    assert nano.scheduler.BlockManager is nano.BlockManager


def test_install_makes_the_scheduler_use_it(nano):
    install()
    config = SimpleNamespace(
        max_num_seqs=4, max_num_batched_tokens=64, eos=-1, kvcache_block_size=8, num_kvcache_blocks=9
    )
    try:
        manager = nano.scheduler.Scheduler(config).block_manager
    finally:
        uninstall()
    assert type(manager) is KVBlocksBlockManager
    assert (manager.block_size, manager.manager.num_blocks) == (8, 9)
    assert nano.scheduler.BlockManager is nano.BlockManager


@pytest.mark.parametrize("call", ["can_allocate", "hash_blocks"])
def test_a_call_that_is_gone_is_named(nano, monkeypatch, call):
    monkeypatch.delattr(nano.BlockManager, call)
    with pytest.raises(UnsupportedEngineError, match=f"BlockManager.{call} is gone"):
        install()
    assert nano.scheduler.BlockManager is nano.BlockManager


def test_a_call_with_other_parameters_is_named(nano, monkeypatch):
    monkeypatch.setattr(nano.BlockManager, "allocate", lambda self, seq: None)  # as it was before prompts in chunks
    with pytest.raises(UnsupportedEngineError, match=r"BlockManager.allocate\(seq, num_cached_blocks\)"):
        check_nano_vllm()


def test_a_new_call_of_the_scheduler_is_named(nano, monkeypatch):
    class Scheduler:
        def swap_out(self, seq):
            self.block_manager.swap_out(seq)

    monkeypatch.setattr(nano.scheduler, "Scheduler", Scheduler)
    with pytest.raises(UnsupportedEngineError, match=r"Scheduler has block_manager\.swap_out") as refused:
        check_nano_vllm()
    assert "Scheduler lacks block_manager.can_append" in str(refused.value)


def test_a_module_that_lost_its_class_is_named(nano, monkeypatch):
    module = importlib.import_module("nanovllm.engine.block_manager")
    assert isinstance(module, ModuleType)
    monkeypatch.delattr(module, "BlockManager")
    with pytest.raises(UnsupportedEngineError, match=r"block_manager\.BlockManager"):
        check_nano_vllm()
