"""The session gate before the scheduler's queue: who waits there, what the gate is told, and what it leaves alone."""

from engine.fake_cache import BLOCK_SIZE, FakeCache, answer_alone, step
from hypothesis import given
from hypothesis import strategies as st

from kvblocks import KVCacheManager, Sequence, Tier
from kvblocks.engine.schedule.entrance import Entrance, make_gate
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.schedule.step import StepLimits
from kvblocks.engine.undoing import undo, written_tokens
from kvblocks.gate import SessionGate


def make_gated(num_blocks=100, room=None, **limits):
    manager = KVCacheManager(num_blocks, BLOCK_SIZE)
    gate = SessionGate(room or num_blocks * BLOCK_SIZE)
    scheduler = Scheduler(manager, 1000, StepLimits(64, 8, **limits))
    scheduler.entrance = Entrance(gate, manager, scheduler.lookups)
    return scheduler, FakeCache(BLOCK_SIZE)


def add(scheduler, name, prompt, session=None, max_tokens=2, salt=None):
    request = Request(Sequence(name, prompt, session=session, salt=salt), max_tokens)
    scheduler.add(request)
    return request


def at(scheduler, now):
    scheduler.manager.now = now


def test_a_session_without_room_waits_before_the_queue_and_others_pass_it():
    scheduler, cache = make_gated(room=40)
    first = add(scheduler, "a", [0] * 30, "one", max_tokens=3)
    assert step(scheduler, cache) == [("a", 0, 30)]
    add(scheduler, "b", [1] * 30, "two")
    add(scheduler, "c", [2] * 4)  # without a session
    assert step(scheduler, cache) == [("a", 30, 1), ("c", 0, 4)]
    assert [request.sequence.sequence_id for request in scheduler.entrance.held] == ["b"]
    (waits,) = scheduler.entrance.view.waiting
    assert (waits.reason, waits.session) == ("room", (None, "two"))
    while first.finish_reason is None:
        step(scheduler, cache)
    assert not scheduler.waiting
    at(scheduler, 1000.0)  # the hold of "one" is over
    assert step(scheduler, cache) == [("b", 0, 30)]
    assert scheduler.entrance.view.members == (((None, "two"), 30, None),)


def test_a_session_of_another_tenant_is_another_one():
    scheduler, cache = make_gated(room=40)
    add(scheduler, "a", [0] * 30, "one", max_tokens=9, salt="x")
    step(scheduler, cache)
    add(scheduler, "b", [0] * 20, "one", salt="y")
    step(scheduler, cache)
    assert [key for key, _, _ in scheduler.entrance.view.members] == [("x", "one")]
    (waits,) = scheduler.entrance.view.waiting
    assert waits.session == ("y", "one")


def test_whose_prompt_is_cached_is_the_next():
    scheduler, cache = make_gated(room=60)
    add(scheduler, "known", [2] * 16, max_tokens=1)  # without a session
    step(scheduler, cache)
    add(scheduler, "a", [0] * 50, "one", max_tokens=9)
    step(scheduler, cache)
    add(scheduler, "b", [1] * 20, "two")
    add(scheduler, "c", [2] * 20, "three")
    step(scheduler, cache)
    assert [waits.session for waits in scheduler.entrance.view.waiting] == [(None, "three"), (None, "two")]


def test_an_idle_scheduler_says_when_the_gate_may_let_somebody_in():
    scheduler, cache = make_gated(room=40)
    at(scheduler, 100.0)
    request = add(scheduler, "a", [0] * 30, "one", max_tokens=1)
    assert scheduler.entrance.wake_at < 100.0  # at once
    scheduler.note_step(chunks := scheduler.schedule(), 60.0)  # 2 s a token
    scheduler.complete(chunks, cache.run(chunks))
    assert request.finish_reason == "length"
    add(scheduler, "b", [1] * 20, "two", max_tokens=1)
    assert not scheduler.has_work
    assert scheduler.schedule() == []
    assert not scheduler.has_work
    assert scheduler.entrance.wake_at == 110.0  # a quarter of 40 s
    at(scheduler, 109.9)
    assert scheduler.schedule() == []
    at(scheduler, 110.0)
    assert step(scheduler, cache) == [("b", 0, 20)]
    assert scheduler.entrance.wake_at is None


def test_what_comes_back_after_a_preemption_passes_no_gate():
    scheduler, cache = make_gated(num_blocks=6, room=24, watermark=0.0)
    old, young = (
        add(scheduler, name, [number] * 7, name, max_tokens=9) for number, name in enumerate(["old", "young"])
    )
    while not young.num_preemptions:
        step(scheduler, cache)
    assert scheduler.waiting[0] is young
    assert not scheduler.entrance.held
    add(scheduler, "third", [2] * 9, "third")
    while scheduler.has_work:
        step(scheduler, cache)
    assert old.output_token_ids == answer_alone((None, 0), [0] * 7, 9)
    assert young.output_token_ids == answer_alone((None, 0), [1] * 7, 9)


def test_all_samples_of_a_prompt_are_one_request_to_the_gate():
    scheduler, cache = make_gated(room=40)
    add(scheduler, "a", [0] * 30, "one", max_tokens=5)
    step(scheduler, cache)
    request = Request(Sequence(("b", 0), [1] * 20, session="two"), 3)
    second, third = request.add_sample(("b", 1)), request.add_sample(("b", 2))
    scheduler.add(request)
    assert step(scheduler, cache) == [("a", 30, 1)]
    scheduler.cancel(request)
    assert list(scheduler.entrance.held) == [second]
    at(scheduler, 1000.0)
    while second.finish_reason is None or third.finish_reason is None:
        step(scheduler, cache)
    ((key, tokens, paused_at),) = scheduler.entrance.gate.members()
    assert (key, tokens, paused_at) == ((None, "two"), 23, 1000.0)
    assert third.output_token_ids == answer_alone((None, 2), [1] * 20, 3)
    assert second.output_token_ids == answer_alone((None, 1), [1] * 20, 3)


def test_a_cancelled_or_expired_request_waits_no_more():
    scheduler, cache = make_gated(room=40)
    add(scheduler, "a", [0] * 30, "one", max_tokens=9)
    step(scheduler, cache)
    asked, unasked = add(scheduler, "b", [1] * 20, "two"), None
    step(scheduler, cache)
    unasked = add(scheduler, "c", [1] * 20, "three")
    late = Request(Sequence("d", [1] * 20, session="four"), 1, deadline=5.0)
    scheduler.add(late)
    scheduler.cancel(asked)
    scheduler.cancel(unasked)
    assert scheduler.expire(5.0) == [late]
    assert not scheduler.entrance.held
    assert scheduler.entrance.gate.stats.num_waiting_requests == 0
    step(scheduler, cache)
    assert scheduler.entrance.view.stats.num_waiting_requests == 0


def test_an_interrupted_step_lets_all_pass_and_the_gate_begins_anew():
    scheduler, cache = make_gated(room=40)
    running = add(scheduler, "a", [0] * 30, "one", max_tokens=9)
    step(scheduler, cache)
    held = add(scheduler, "b", [1] * 20, "two")
    step(scheduler, cache)
    undo(scheduler, written_tokens(scheduler))
    assert list(scheduler.waiting) == [running, held]
    while scheduler.has_work:
        step(scheduler, cache)
    assert held.output_token_ids == answer_alone((None, 0), [1] * 20, 2)
    add(scheduler, "c", [1] * 20, "two")
    assert step(scheduler, cache) != []


def test_the_room_is_what_the_pool_holds_and_half_of_a_host_tier():
    assert make_gate(KVCacheManager(100, 16), 512).num_tokens == 1600
    tiers = [Tier("host", 200, num_block_bytes=1), Tier("disk", 1000, num_block_bytes=1)]
    assert make_gate(KVCacheManager(100, 16, tiers=tiers), 512).num_tokens == 3200


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 5), st.integers(0, 3)),
    min_size=1,
    max_size=12,
)


@given(PROMPTS, st.sampled_from([8, 16, 40]), st.integers(1, 4))
def test_a_gate_with_room_for_all_changes_no_decision(prompts, num_blocks, at_once):
    """Off, and on with room: the same chunks in the same steps, also if several prompts come at once."""
    histories = []
    for gate in (None, SessionGate(10_000)):
        scheduler = Scheduler(KVCacheManager(num_blocks, BLOCK_SIZE), 1000, StepLimits(16, 4))
        if gate is not None:
            scheduler.entrance = Entrance(gate, scheduler.manager, scheduler.lookups)
        cache, history = FakeCache(BLOCK_SIZE), []
        for number, (prompt, max_tokens, session) in enumerate(prompts):
            at(scheduler, float(number))
            add(scheduler, number, prompt, session or None, max_tokens)
            if number % at_once == 0:
                history.append(step(scheduler, cache))
        while scheduler.has_work or scheduler.entrance.held:
            history.append(step(scheduler, cache))
        histories.append((history, scheduler.manager.stats))
    assert histories[0] == histories[1]


@given(PROMPTS, st.integers(1, 60), st.data())
def test_every_request_gets_its_answer_whatever_the_room(prompts, room, data):
    scheduler, cache = make_gated(num_blocks=16, room=room)
    requests, now = [], 0.0
    for number, (prompt, max_tokens, session) in enumerate(prompts):
        now += data.draw(st.sampled_from([0.0, 1.0, 50.0]))
        at(scheduler, now)
        requests.append((prompt, max_tokens, add(scheduler, number, prompt, session or None, max_tokens)))
        if data.draw(st.booleans()):
            step(scheduler, cache)
    for _ in range(1000):
        if not (scheduler.has_work or scheduler.entrance.held):
            break
        if not scheduler.has_work:
            assert scheduler.entrance.wake_at is not None, "nothing would ever wake it"
            now = max(now, scheduler.entrance.wake_at)
            at(scheduler, now)
        chunks = scheduler.schedule()
        scheduler.note_step(chunks, 1.0)
        scheduler.complete(chunks, cache.run(chunks))
    for prompt, max_tokens, request in requests:
        assert request.output_token_ids == answer_alone((None, 0), prompt, max_tokens)
