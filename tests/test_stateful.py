"""The manager against the reference model, over generated histories on pools so small that eviction never stops."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from model.history import OPERATIONS, FragileHash, History, RandomChooser, walk

from kvblocks.hashing.scheme import sha256_digest


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
def test_machine_agrees_with_the_reference_model(variant: str) -> None:
    machine = type("Machine", (ManagerMachine,), {"options": VARIANTS[variant]})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=50))


@pytest.mark.every(4)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("num_blocks", "block_size"), [(6, 1), (10, 2), (24, 2), (30, 1), (12, 3)])
def test_long_walks_agree_with_the_reference_model(variant: str, num_blocks: int, block_size: int, met: Any) -> None:
    history = History(num_blocks, block_size, **VARIANTS[variant])
    walk(history, RandomChooser(seed=num_blocks * 10 + block_size), num_operations=4000)
    assert history.num_refused and history.num_loaded and history.memory.num_deaths
    assert bool(history.num_hits) == history.model.enable_caching
    assert bool(history.num_failed_hashes) == isinstance(history.hash, FragileHash)
    met["long walks"].add(history.met())


def test_the_long_walks_met_all_cases(met: Any) -> None:
    least = {"taken": 20_000, "evicted": 1400, "refused": 3500, "hits": 1000, "stale_hits": 45, "detached": 220}
    least |= {"pending": 2000, "given_up": 50_000, "renewed": 60, "failed_hashes": 30, "rewound": 850, "dropped": 450}
    least |= {"loaded": 500, "failed_loads": 320, "orphans": 330, "second_loads": 40, "forked_loads": 85}
    least |= {
        "lost_hits": 50,
        "loads_at_reset": 90,
        "held_truncations": 10,
        "late": 2600,
        "commits": 260,
        "smaller_commits": 600,
    }
    least |= {"operations": 10_000, "deaths": 1500, "copied": 130}  # of the memory
    # In so many walks:
    least |= {f"cause: {cause}": 15 for cause in ("no miss", "other keys", "never cached")}
    least |= {f"cause: {cause}": 8 for cause in ("evicted", "aborted", "reset", "partly equal")}
    met["long walks"].check(25, least)


@pytest.mark.every(2)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("num_blocks", "block_size"), [(10, 2), (24, 2)])
def test_walks_that_forget_salts_agree_with_the_reference_model(
    variant: str, num_blocks: int, block_size: int, met: Any
) -> None:
    history = History(num_blocks, block_size, **VARIANTS[variant])
    walk(history, RandomChooser(seed=num_blocks), num_operations=1500, forget_every=50)
    assert bool(history.num_forgotten) == history.model.enable_caching
    met["forgetting"].add(history.met())


def test_the_walks_that_forget_salts_met_all_cases(met: Any) -> None:
    met["forgetting"].check(10, {"forgotten": 240, "hits": 90, "stale_hits": 8, "refused": 300, "evicted": 70})
