"""The independent simulator agrees with KVCacheManager. No code of the replay takes part."""

from hypothesis import given, settings
from hypothesis import strategies as st
from replay.independent import Ask, Pool, simulate
from replay.small_traces import chains

from kvblocks import KVCacheManager, Sequence

Chain = tuple[int, ...]


def ask(chain: Chain, *, session: str = "a", arrival: float = 0, seconds: float = 1, think: float = 0):
    return Ask(session, arrival, think, seconds, chain)


steps = st.lists(st.one_of(chains().filter(bool), st.integers(0, 5)), max_size=60)


@given(num_blocks=st.integers(1, 14), todo=steps)
@settings(max_examples=200, deadline=None)
def test_admissions_and_ends_are_those_of_the_manager(num_blocks, todo):
    """A block of one token is a trace block; a number in `todo` ends one of the running requests."""
    pool, manager = Pool(num_blocks), KVCacheManager(num_blocks, 1, debug=True)
    running: list[tuple[Ask, Sequence]] = []
    for number, step in enumerate(todo):
        if isinstance(step, int):
            if running:
                ended, sequence = running.pop(step % len(running))
                pool.release(ended)
                manager.free(sequence)
            continue
        asked, sequence = ask(step), Sequence(number, list(step))
        hit = manager.get_computed_blocks(sequence)
        blocks = manager.allocate_slots(sequence, hit=hit)
        assert pool.admit(asked) == (None if blocks is None else len(hit.blocks))
        if blocks is not None:
            running.append((asked, sequence))
        assert len(pool.free) + pool.empty == manager.num_free_blocks


def test_the_end_of_a_chain_goes_first():
    trace = [ask((1, 2, 3)), ask((9,), arrival=2, seconds=1), ask((1, 2, 3), arrival=4)]
    assert [served.num_hit for served in simulate(trace, 3)] == [0, 0, 2]


def test_what_does_not_fit_waits_and_nobody_passes():
    trace = [
        ask((1, 2), seconds=5),
        ask((3, 4), arrival=1),
        ask((5,), arrival=2, seconds=3),
        ask((5, 6, 7, 8), arrival=3),
    ]
    served = simulate(trace, 3)
    assert [outcome.admitted for outcome in served] == [0, 5, 5, None]
    assert [outcome.ended for outcome in served] == [5, 6, 8, 3]


def test_a_closed_loop_thinks_after_the_end():
    trace = [ask((1,), seconds=5), ask((1, 2), arrival=1, think=2), ask((3,), session="b", arrival=1)]
    assert [outcome.arrived for outcome in simulate(trace, 9)] == [0, 1, 1]
    assert [outcome.arrived for outcome in simulate(trace, 9, closed_loop=True)] == [0, 7, 1]
    assert [outcome.num_hit for outcome in simulate(trace, 9, closed_loop=True)] == [0, 1, 0]
