"""Managers with recurrent states against the reference model of states, as in test_group_stateful.py."""

from typing import Any

import pytest
from model.history import RandomChooser, walk
from model.state_history import StateHistory
from test_stateful import VARIANTS

from kvblocks import ChunkedLocal, FullAttention, Group, RecurrentState, SlidingWindow

STATE_SETS: dict[str, tuple[list[Group], RecurrentState]] = {
    "one page": ([FullAttention(2)], RecurrentState(2, 3)),
    "three pages": ([FullAttention(2)], RecurrentState(2, 3, 3)),
    "few places": ([FullAttention(2)], RecurrentState(4, 4, 2)),
    "each place": ([FullAttention(1)], RecurrentState(1, 4, 2, every=2)),
    "drafts": ([FullAttention(2)], RecurrentState(2, 4, 2, num_kept=2)),
    "beside a window": ([FullAttention(2), SlidingWindow(2, 3)], RecurrentState(2, 4, 2)),
    "beside chunks": ([ChunkedLocal(2, 6), FullAttention(4)], RecurrentState(4, 4, 3, every=8)),
    "beside two": ([FullAttention(2), FullAttention(4), SlidingWindow(2, 3)], RecurrentState(2, 3, 2, num_kept=1)),
}


def make_history(name: str, variant: str, num_blocks: int = 12) -> StateHistory:
    groups, state = STATE_SETS[name]
    return StateHistory(num_blocks * len(groups) + 3 * state.checkpoint_blocks, groups, state, **VARIANTS[variant])


@pytest.mark.every(3)
@pytest.mark.parametrize("variant", ["xxh3_128", "3-bit hash"])
@pytest.mark.parametrize("name", STATE_SETS)
def test_walks_agree_with_the_reference_model(variant: str, name: str, met: Any) -> None:
    history = make_history(name, variant)
    walk(history, RandomChooser(seed=len(name + variant)), num_operations=500, forget_every=70)
    met["walks"].add(history.met())


@pytest.mark.parametrize(("seed", "num_operations"), [(6005, 850), (7001, 400)])
def test_what_a_pin_loses_is_reused_behind_what_saves_that_wait_lose(seed: int, num_operations: int) -> None:
    """In these walks one call takes blocks of both, so that it shows which of them give theirs back first."""
    history = make_history("each place", "xxh3_128", 8 + seed % 3 * 8)
    walk(history, RandomChooser(seed), num_operations, forget_every=seed % 3 * 40)


def test_what_a_rewound_sequence_was_to_save_is_given_back_behind_its_blocks() -> None:
    """In this walk it shares other blocks with a fork, which loses them, too."""
    walk(make_history("each place", "a hash that raises", 24), RandomChooser(7100), 600, forget_every=80)


def test_the_walks_met_all_cases(met: Any) -> None:
    least = {"taken": 1700, "evicted": 110, "refused": 100, "slots_refused": 60, "cleared": 280, "restored": 15}
    least |= {"cuts": 110, "limited": 110, "hits": 6, "rewound": 15, "forks_refused": 10, "refused_truncations": 15}
    least |= {"pages": 34, "dead": 1400, "commits": 15, "cause: state": 12}
    met["walks"].check(2 * len(STATE_SETS), least)
