"""What hits on the device use is told to the shared store, and what the store lost is stored again."""

import os
import signal
import threading
import time
from itertools import count

import pytest
from engine.small_models import random_tokens
from engine.tiers.test_engine_store import HASTY, back, counted, module_server, server, share
from engine.tiers.test_engine_tiers import CONFIG, ask, make, model, prompts, settle
from tiers.store.servers import running, wait_for
from tiers.store.test_store import keys_of

from kvblocks.tiers.store import RecentUses, SharedStore, recent

__all__ = ["make", "model", "module_server", "server", "share"]  # fixtures

pytestmark = pytest.mark.usefixtures("loads_whatever_is_there")


@pytest.fixture
def always(monkeypatch):
    """Every use is told."""
    monkeypatch.setattr(recent, "TOUCH_EVERY_S", 0.0)


def blocks_of(server):
    return [key for key in keys_of(server) if key.count(b":") == 4 and not key.endswith(b":q")]


MARKER = "of the test's own"


def idle_s(server):
    """For how many seconds no block was touched, and the marker wasn't written: all by the clock of one moment."""
    with server.client() as client, client.pipeline() as asked:
        for key in (*blocks_of(server), MARKER):
            asked.object("idletime", key)
        *idle, marked = asked.execute()
    return idle, marked


def told(engine):
    """Wait until the store has heard of all uses, and its answers are noted."""
    uses = engine.offload._seeker._uses  # noqa: SLF001
    wait_for(lambda: len(uses._ended) == uses._num_waiting)  # noqa: SLF001


def test_repeats_and_short_suffixes_are_uses(share, server, always):
    (prompt,) = prompts(1)
    engine = share()
    ask(engine, prompt)
    settle(engine)
    num_blocks = len(blocks_of(server))
    assert num_blocks >= 18
    for again in (prompt, prompt[:297] + random_tokens(CONFIG, 3, seed=70)):
        server.client().set(MARKER, "")
        wait_for(lambda: min(*idle_s(server)[0], idle_s(server)[1]) >= 1)  # the store's clock ticks in seconds
        answer, _ = ask(engine, again)
        told(engine)
        idle, marked = idle_s(server)
        assert sum(one < marked for one in idle) >= 18 and answer.num_cached_tokens >= 288
    assert counted(engine).num_lookups == 1, "and nobody waited"


def test_after_a_flush_hits_on_the_device_store_again(share, server, always):
    (prompt,) = prompts(1)
    engine, other = share(), share()
    first, _ = ask(engine, prompt)
    settle(engine)
    for _ in range(3):
        server.client().flushall()
        ask(engine, prompt)  # the store's answer may come when this has ended
        told(engine)
        ask(engine, prompt)
        settle(engine)
        assert len(blocks_of(server)) >= 18
    answer, _ = ask(other, prompt)
    assert answer.num_loaded_tokens == {"store": 288} and answer.token_ids == first.token_ids


def test_the_end_of_a_prefix_that_the_store_evicted_is_stored_again(share, server, always):
    (prompt,) = prompts(1)
    engine = share()
    ask(engine, prompt)
    settle(engine)
    with server.client() as client:
        for key in blocks_of(server)[::2]:
            client.delete(key)
    for _ in range(2):
        ask(engine, prompt)
        told(engine)
        settle(engine)
    assert len(blocks_of(server)) >= 18
    assert counted(engine).num_written_blocks < 2 * 19, "only what was gone"


def test_a_store_that_hangs_delays_no_hit_on_the_device(make, tmp_path, always):
    (prompt,) = prompts(1)
    with running(tmp_path) as server:
        engine = make(tiers=[server.url + HASTY])
        back(engine)
        first, _ = ask(engine, prompt)
        settle(engine)
        pid = server.client().info("server")["process_id"]
        os.kill(pid, signal.SIGSTOP)
        try:
            took = []
            for _ in range(5):
                start = time.perf_counter()
                answer, _ = ask(engine, prompt)
                took.append(time.perf_counter() - start)
                assert answer.token_ids == first.token_ids and answer.num_cached_tokens >= 288
            wait_for(lambda: counted(engine).is_away)
            assert counted(engine).num_lookups == 1
        finally:
            os.kill(pid, signal.SIGCONT)
        back(engine)


def test_a_use_waits_for_no_store_and_only_so_many_wait(share, server, always, monkeypatch):
    """The thread of the stores is busy: requests go on, and the queue stays bounded."""
    (prompt,) = prompts(1)
    engine = share()
    ask(engine, prompt)
    settle(engine)
    gate, numbers, plain = threading.Event(), count(), SharedStore.touch

    def late(store, *given):
        assert gate.wait(60)
        next(numbers)
        return plain(store, *given)

    monkeypatch.setattr(SharedStore, "touch", late)
    monkeypatch.setattr("kvblocks.engine.tiers.uses.MOST_WAITING", 3)
    for _ in range(6):
        ask(engine, prompt)
    gate.set()
    told(engine)
    assert next(numbers) == 3
    ask(engine, prompt)
    told(engine)
    assert next(numbers) == 5, "another one, when there is room"


def test_a_prompt_that_comes_often_is_told_now_and_then(share):
    (prompt,) = prompts(1)
    engine = share()
    ask(engine, prompt)
    settle(engine)
    calls = []
    plain = engine.offload._seeker._store.touch  # noqa: SLF001
    engine.offload._seeker._store.touch = lambda *given: calls.append(given) or plain(*given)  # noqa: SLF001
    for _ in range(5):
        ask(engine, prompt)
    told(engine)
    assert len(calls) == 1


def test_uses_count_for_a_quota_too(share, server, always):
    (prompt,) = prompts(1)
    engine, other = share(), share()
    for one in (engine, other):
        one.manager.tiers.set_quota("store", "ann", 100)
    ask(engine, prompt, salt="ann")
    settle(engine)
    client = server.client()
    (index,) = client.keys("*:q")

    def newest():
        return client.zrange(index, 0, 0, withscores=True)[0][1]

    for one, what in ((engine, "a hit on the device"), (other, "a load")):
        before = newest()
        time.sleep(0.11)
        answer, _ = ask(one, prompt, salt="ann")
        told(one)
        settle(one)
        first = client.zscore(index, min(client.zrange(index, 0, -2), key=lambda d: -client.zscore(index, d)))
        assert first > before, what
        assert one is engine or answer.num_loaded_tokens == {"store": 288}


def test_uses_are_due_once_in_a_while_and_few_are_kept(monkeypatch):
    monkeypatch.setattr(recent, "MOST_KEPT", 2)
    uses = RecentUses()
    assert uses.is_due("a", 0.0) and not uses.is_due("a", 9.9) and uses.is_due("a", 10.0)
    assert not uses.is_due("a", 12.0)
    uses.forget("a")
    assert uses.is_due("a", 12.0)
    assert uses.is_due("b", 13.0) and uses.is_due("c", 13.0)
    assert uses.is_due("a", 13.0), "the oldest was dropped"
    assert not uses.is_due("c", 14.0)
