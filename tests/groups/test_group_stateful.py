"""Managers of several groups against the reference model of several groups, as in test_stateful.py for one."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from model.group_history import GROUP_OPERATIONS, GroupHistory
from model.history import RandomChooser, walk
from test_stateful import VARIANTS, DataChooser

from kvblocks import ChunkedLocal, FullAttention, Group, Scratch, SlidingWindow

SETS: dict[str, list[Group]] = {
    "full and window": [FullAttention(2), SlidingWindow(2, 3)],
    "window first": [SlidingWindow(2, 4), FullAttention(2)],
    "smaller blocks": [FullAttention(4), SlidingWindow(2, 5)],
    "larger blocks": [SlidingWindow(4, 6), FullAttention(2)],
    "two windows": [FullAttention(2), SlidingWindow(2, 2), SlidingWindow(2, 5)],
    "window of one": [FullAttention(2), SlidingWindow(2, 1), SlidingWindow(1, 2)],
    "two full": [FullAttention(2), FullAttention(4), SlidingWindow(2, 3)],
    "kept windows": [FullAttention(2), SlidingWindow(2, 3, keeps_passed=True), SlidingWindow(2, 5)],
    "quick appends": [FullAttention(4), SlidingWindow(4, 5)],
    "uncached window": [FullAttention(4), SlidingWindow(4, 3, is_cached=False)],
    "some cached": [FullAttention(2), SlidingWindow(2, 3, is_cached=False), SlidingWindow(2, 4)],
    "full and chunks": [FullAttention(2), ChunkedLocal(2, 6)],
    "chunks within blocks": [ChunkedLocal(4, 6, keeps_passed=True), FullAttention(2), ChunkedLocal(2, 3)],
    "chunks and windows": [
        FullAttention(4),
        ChunkedLocal(2, 8),
        SlidingWindow(4, 5),
        ChunkedLocal(4, 4, is_cached=False),
    ],
    "chunks only": [ChunkedLocal(2, 4), ChunkedLocal(2, 7)],
    "full and scratch": [FullAttention(2), Scratch()],
    "scratch and windows": [Scratch(), SlidingWindow(2, 3), FullAttention(4)],
    "scratch and windows only": [SlidingWindow(2, 3), Scratch()],
    "one window": [SlidingWindow(2, 3)],
    "windows only": [SlidingWindow(2, 3), SlidingWindow(4, 6)],
}


class GroupMachine(RuleBasedStateMachine):
    options: dict[str, Any]

    @initialize(num_blocks=st.integers(2, 24), groups=st.sampled_from(list(SETS.values())), data=st.data())
    def make(self, num_blocks: int, groups: list[Group], data: st.DataObject) -> None:
        self.history = GroupHistory(num_blocks, groups, **self.options)
        for _ in range(3):
            self.history.new(DataChooser(data))

    @rule(data=st.data(), operation=st.sampled_from([op for op, weight in GROUP_OPERATIONS for _ in range(weight)]))
    def do(self, data: st.DataObject, operation: Any) -> None:
        operation(self.history, DataChooser(data))

    @rule(data=st.data(), really=st.integers(0, 20))
    def reset(self, data: st.DataObject, really: int) -> None:
        if really == 20:
            self.history.reset(DataChooser(data))

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "history"):
            self.history.check()


@pytest.mark.parametrize("variant", VARIANTS)
def test_machine_agrees_with_the_reference_model(variant: str) -> None:
    machine = type("Machine", (GroupMachine,), {"options": VARIANTS[variant]})
    run_state_machine_as_test(
        machine, settings=settings(stateful_step_count=40, max_examples=settings().max_examples // 2)
    )


@pytest.mark.every(4)
@pytest.mark.parametrize("variant", ["xxh3_128", "3-bit hash", "a hash that raises"])
@pytest.mark.parametrize("name", SETS)
def test_long_walks_agree_with_the_reference_model(variant: str, name: str, met: Any) -> None:
    history = GroupHistory(10 * len(SETS[name]), SETS[name], **VARIANTS[variant])
    walk(history, RandomChooser(seed=len(name)), num_operations=1000)
    assert history.num_refused and history.num_hits and (history.memory.num_dead or name == "full and scratch")
    met["long walks"].add(history.met())


def test_the_long_walks_met_all_cases(met: Any) -> None:
    least = {"taken": 15_000, "evicted": 1700, "refused": 850, "hits": 320, "limited": 110, "stale_hits": 9}
    least |= {"pending": 550, "given_up": 15_000, "renewed": 13, "failed_hashes": 11, "rewound": 200, "dropped": 170}
    least |= {"loaded": 270, "failed_loads": 70, "orphans": 95, "second_loads": 8, "forked_loads": 27}
    least |= {"loads_at_reset": 20, "late": 1000, "commits": 110, "smaller_commits": 190, "detached": 65}
    least |= {"attached": 3000, "refused_truncations": 15}
    least |= {"operations": 4000, "deaths": 550, "dead": 32_000, "copied": 140}  # of the memory
    # In so many walks:
    least |= {f"cause: {cause}": 20 for cause in ("no miss", "other keys", "never cached", "partly equal", "group")}
    least |= {f"cause: {cause}": 8 for cause in ("evicted", "aborted", "reset", "dropped")}
    met["long walks"].check(3 * len(SETS), least)


def test_walks_without_caching_agree_too() -> None:
    num_dead = 0
    for name, groups in SETS.items():
        history = GroupHistory(8 * len(groups), groups, **VARIANTS["caching off"])
        walk(history, RandomChooser(seed=len(name)), num_operations=300)
        assert history.num_hits == 0
        num_dead += history.memory.num_dead
    assert num_dead > 100


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "num_kept_per_block"), [("one window", 1), ("windows only", 0)])
@pytest.mark.parametrize("variant", ["xxh3_128", "3-bit hash"])
def test_walks_agree_where_few_virtual_blocks_are_kept(
    name: str, num_kept_per_block: int, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvblocks.core.virtual_blocks.KEPT_PER_BLOCK", num_kept_per_block)
    num_hits, causes, has_history = 0, set[str](), False
    for seed in range(8, 11):
        history = GroupHistory(14, SETS[name], **VARIANTS[variant])
        walk(history, RandomChooser(seed), num_operations=3000)
        assert len(history.model.virtual) < 50 and history.model.num_ids < 14 + 60  # a thousand were asked for
        num_hits += history.num_hits
        causes |= history.causes
        has_history = history.has_history
    assert num_hits > 60
    assert not has_history or "evicted" in causes


@pytest.mark.exhaustive
def test_walks_meet_what_is_rare() -> None:
    """Pins that hold a window, truncations that are refused, hits that went stale."""
    histories = []
    for seed in range(3):
        history = GroupHistory(24, SETS["two windows"], debug=True)
        walk(history, RandomChooser(seed), num_operations=3000)
        histories.append(history)
    assert sum(history.num_attached for history in histories) > 100
    assert sum(history.num_given_up for history in histories) > 100
    assert sum(history.num_refused_truncations for history in histories) > 5
    assert sum(history.model.num_kept_in_flight for history in histories) > 20
    assert sum(history.num_second_loads for history in histories) > 0
    assert sum(history.num_forked_loads for history in histories) > 5
    assert sum(history.num_loads_at_reset for history in histories) > 2
    assert sum(history.num_stale_hits for history in histories) > 3
    assert sum(history.num_detached for history in histories) > 5


@pytest.mark.every(2)
@pytest.mark.parametrize("groups", SETS)
def test_walks_that_forget_salts_agree_with_the_reference_model(groups: str, met: Any) -> None:
    history = GroupHistory(24, SETS[groups], debug=True)
    walk(history, RandomChooser(7), num_operations=1000, forget_every=20)
    met["forgetting"].add(history.met())


def test_the_walks_that_forget_salts_met_all_cases(met: Any) -> None:
    met["forgetting"].check(len(SETS), {"forgotten": 130, "hits": 60})
