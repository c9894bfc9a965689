"""The manager against the dumb model, over generated histories on pools so small that eviction never stops."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from model.history import OPERATIONS, FragileHash, History, RandomChooser, walk

from kvblocks.core.hashing import sha256_digest


def three_bit_hash(preimage: bytes) -> bytes:
    """Only eight different digests."""
    return bytes([sha256_digest(preimage)[0] & 7])


class DataChooser:
    """Asks hypothesis."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def choose(self, options: Any) -> Any:
        return self.data.draw(st.sampled_from(options))

    def integer(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))


# With eight digests several prefixes share a name, so that history has no events. Without events and debugging, decoded
# tokens take fast paths. So both are on in one variant and off in another.
VARIANTS = {
    "xxh3_128": {"enable_events": True, "num_history_blocks": 100_000, "debug": True},
    "short ways": {"first_block_id": 2},
    "3-bit hash": {"hash_algorithm": three_bit_hash, "first_block_id": 3},
    "a hash that raises": {"hash_algorithm": FragileHash(), "enable_events": True, "num_history_blocks": 100_000},
    "caching off": {"enable_caching": False, "enable_events": True},
}


class ManagerMachine(RuleBasedStateMachine):
    options: dict[str, Any]

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 3), data=st.data())
    def make(self, num_blocks: int, block_size: int, data: st.DataObject) -> None:
        self.history = History(num_blocks, block_size, **self.options)
        for _ in range(3):
            self.history.new(DataChooser(data))

    @rule(data=st.data(), operation=st.sampled_from([op for op, weight in OPERATIONS for _ in range(weight)]))
    def do(self, data: st.DataObject, operation: Any) -> None:
        operation(self.history, DataChooser(data))

    @rule(data=st.data(), really=st.integers(0, 20))
    def reset(self, data: st.DataObject, really: int) -> None:
        if really == 20:  # seldom, or nothing would live long enough to be hit
            self.history.reset(DataChooser(data))

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "history"):
            self.history.check()


@pytest.mark.parametrize("variant", VARIANTS)
def test_machine_agrees_with_the_dumb_model(variant: str) -> None:
    machine = type("Machine", (ManagerMachine,), {"options": VARIANTS[variant]})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=50))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("num_blocks", "block_size"), [(6, 1), (10, 2), (24, 2), (30, 1), (12, 3)])
def test_long_walks_agree_with_the_dumb_model(variant: str, num_blocks: int, block_size: int) -> None:
    history = History(num_blocks, block_size, **VARIANTS[variant])
    walk(history, RandomChooser(seed=num_blocks * 10 + block_size), num_operations=10_000)
    # A walk without these cases would prove little.
    assert history.num_refused > 100
    assert history.manager.stats.num_taken_blocks > 500
    if history.model.enable_caching:
        assert history.num_hits > 100
        assert history.num_stale_hits > 2
        assert history.num_detached > 10
        assert history.num_pending > 10
        assert history.num_given_up > 100
        assert history.num_renewed > 0
        assert {"no miss", "other keys", "never cached"} <= history.causes
        assert history.manager.stats.num_evicted_blocks > 140
    if history.has_history:
        assert {"evicted", "aborted", "reset"} <= history.causes
    assert (history.num_failed_hashes > 10) == isinstance(history.hash, FragileHash)
    assert history.memory.num_operations > 500
    assert history.memory.num_deaths > 100
    assert history.num_loaded > 20
    assert history.num_failed_loads > 10
    assert history.num_orphans > 5
    assert history.num_rewound > 50
    assert history.num_second_loads > 1
    assert history.num_forked_loads > 5
    assert history.num_loads_at_reset > 3
    if history.model.enable_caching:
        assert history.num_dropped > 30
    if block_size > 1:
        assert history.memory.num_copied > 10
    if num_blocks in (12, 30):  # where there is room for holds, and tokens behind prompts fill blocks
        assert history.num_held_truncations > 0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("num_blocks", "block_size"), [(10, 2), (24, 2)])
def test_walks_that_forget_salts_agree_with_the_dumb_model(variant: str, num_blocks: int, block_size: int) -> None:
    history = History(num_blocks, block_size, **VARIANTS[variant])
    walk(history, RandomChooser(seed=num_blocks), num_operations=3000, forget_every=50)
    assert (history.num_forgotten > 10) == history.model.enable_caching
    if history.model.enable_caching:
        assert history.num_hits > 10
