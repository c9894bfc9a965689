"""examples/route_by_prefix.py: what its router chooses, over a mirror of real publishers, and before real servers."""

import importlib.util
import re
from pathlib import Path

import pytest

from kvblocks import KVCacheManager, Sequence
from kvblocks.wire import EventPublisher, Source

PATH = Path(__file__).resolve().parents[2] / "examples" / "route_by_prefix.py"
LOCAL, BLOCK = "tcp://127.0.0.1:0", 4


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("route_by_prefix", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Known:
    """An index that is told."""

    def __init__(self, **cached):
        self.cached, self.forgotten = cached, []

    def find(self, tokens, salt):
        return {name: min(number, len(tokens)) for name, number in self.cached.items()}

    def forget(self, worker):
        self.cached.pop(worker, None)
        self.forgotten.append(worker)


def test_the_least_to_compute_decides(example):
    router = example.Router(Known(a=80, b=40), "abc")
    prompt = [*range(100)]
    first = router.send(prompt, max_tokens=30)
    assert (first.worker, first.num_cached, first.num_left) == ("a", 80, 50)
    # a has 50 left to do, and will have all of the same prompt then: 50 there, 2 x 60 at b, 2 x 100 at c.
    assert router.send(prompt).worker == "a"
    other = [*range(1000, 1100)]  # 80 and 40 tokens are cached of this one too, says the index
    assert router.send(other, max_tokens=10).worker == "a"  # 50 + 2 x 20 there, 2 x 60 at b
    assert router.send([*other, 1], max_tokens=10).worker == "a"  # 80 + 2 there; the load of a waits for 80, not 120
    assert router.send([*range(2000, 2100)]).worker == "b"  # 92 + 2 x 20 at a, 2 x 60 at b
    router.finish(first)
    with pytest.raises(ValueError, match="not in list"):
        router.finish(first)


def test_of_equals_the_one_that_waited_longest(example):
    router = example.Router(Known(), "abc")
    chosen = []
    for number in range(6):
        errand = router.send([number] * 10)
        chosen.append(errand.worker)
        router.finish(errand)
    assert chosen == [*"abcabc"]
    assert [router.send([number] * 10).worker for number in range(6)] == [*"abcabc"]  # the load decides, too


def test_another_salts_prompts_are_not_coming(example):
    router = example.Router(Known(), "ab")
    prompt = [*range(100)]
    assert router.send(prompt, "ann").worker == "a"
    assert router.send(prompt, "bob").worker == "b"
    again = router.send(prompt, "bob")
    assert (again.worker, again.num_cached) == ("b", 100)


def test_one_that_is_down_gets_nothing_and_is_forgotten(example):
    index = Known(a=80)
    router = example.Router(index, "ab")
    errand = router.send([*range(100)])
    router.note_down("a")
    router.note_down("a")
    router.finish(errand)
    assert index.forgotten == ["a"]
    assert router.send([*range(100)]).worker == "b"
    router.note_down("b")
    with pytest.raises(LookupError, match="got none"):
        router.send([1])
    router.note_up("a")
    assert router.send([*range(100)]).num_cached == 0


class Gated:
    """A gated router over two workers with room for 100 tokens each; a token takes a second."""

    def __init__(self, example, index=None):
        self.now = 0.0
        self.router = example.GatedRouter(index or Known(), "ab", 100, 1.0, lambda: self.now)

    def send(self, session, num_tokens=70, salt=None):
        first = 0 if session is None else session * 1000
        return self.router.send([*range(first, first + num_tokens)], salt, session=session)

    def go(self):
        return self.router.release()[0]


def test_each_worker_has_a_gate_and_a_session_stays_with_its_worker(example):
    gated = Gated(example)
    first, second = gated.send(1), gated.send(2)
    assert {first.worker, second.worker} == {*"ab"}
    assert gated.go() == [first, second]
    third, free = gated.send(3, salt="ann"), gated.send(None, 10)
    assert gated.go() == [free], "prompts without a session never wait"
    gated.now = 2.0
    gated.router.end(first, 10, "tool_use")
    again = gated.send(1, 85)
    assert again.worker == first.worker
    assert gated.go() == [again]
    gated.router.end(again, 1, "tool_use")
    gated.router.end(second, 10, "tool_use")
    gated.router.end(free, 10, "stop")
    going, wake_at = gated.router.release()
    assert (going, wake_at) == ([], 2.0 + 15.0), "then a member has paused for too long"
    gated.now = wake_at
    assert gated.go() == [third]
    gated.router.end(third, 0, "stop")
    assert gated.go() == []


def test_what_waits_can_be_withdrawn(example):
    gated = Gated(example)
    inside = [gated.send(1), gated.send(2)]
    waiting = gated.send(3)
    assert gated.go() == inside
    gated.router.finish(waiting)
    for errand in inside:
        gated.router.finish(errand)
    gated.now = 1000.0
    assert gated.router.release() == ([], None)
    with pytest.raises(ValueError, match="not in list"):
        gated.router.finish(waiting)


def test_what_waits_for_a_worker_that_died_waits_for_another(example):
    gated = Gated(example)
    inside = [gated.send(1), gated.send(2)]
    assert gated.go() == inside
    waiting = gated.send(3)
    dead, alive = waiting.worker, {"a": "b", "b": "a"}[waiting.worker]
    gated.router.note_down(dead)
    assert waiting.worker == alive
    assert gated.go() == []
    for errand in inside:
        gated.router.end(errand, 10, "stop")  # that at the dead worker has failed
    gated.now = 15.0
    assert gated.go() == [waiting]
    assert {gated.send(1).worker, gated.send(2).worker} == {alive}
    gated.router.note_down(alive)
    with pytest.raises(LookupError, match="got none"):
        gated.send(4)
    gated.router.note_up("a")
    assert gated.send(4).worker == "a"


@pytest.mark.parametrize(
    ("one", "other", "expected"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 5, 3], 1), ([2], [1], 0)]
)
def test_num_common(example, one, other, expected):
    assert example.num_common(one, other) == example.num_common(other, one) == expected


class Engine:
    """A manager and its publisher."""

    def __init__(self, *ends):
        self.manager = KVCacheManager(64, BLOCK, enable_events=True)
        self.publisher = EventPublisher(*ends or (LOCAL, LOCAL), heartbeat=0.05)
        self.ends = self.publisher.endpoint, self.publisher.replay_endpoint

    def run(self, tokens, salt=None):
        sequence = Sequence(len(tokens), tokens, salt=salt)
        self.manager.allocate_slots(sequence)
        self.manager.free(sequence)
        self.publisher.publish(self.manager.take_events())


def caught_up(index, engines):
    for name, engine in engines.items():
        for _ in range(600):
            index.client.receive(0.05)
            mirror = index.client.mirror
            if mirror.is_complete(name) and mirror.number(name) >= engine.publisher.number:
                break
        else:
            pytest.fail(f"{name}: the mirror stands at {mirror.number(name)}, not {engine.publisher.number}")


def test_a_mirror_as_the_index_through_a_death_and_a_return(example):
    engines = {name: Engine() for name in "ab"}
    workers = {name: example.Worker("", Source(*engine.ends)) for name, engine in engines.items()}
    index = example.MirrorIndex(workers, BLOCK)
    router = example.Router(index, workers)
    prompt = [*range(21)]
    engines["b"].run(prompt)
    engines["a"].run(prompt, "ann")
    caught_up(index, engines)
    assert index.find(prompt, None) == {"a": 0, "b": 20}
    assert index.find(prompt, "ann") == {"a": 20, "b": 0}
    assert router.send(prompt).worker == "b"
    engines["b"].publisher.close()
    router.note_down("b")
    assert index.find(prompt, None)["b"] == 0  # at once, though nobody said so
    engines["b"] = Engine(*engines["b"].ends)  # the same ports, and an empty cache
    engines["b"].run([7] * 9)
    caught_up(index, engines)
    router.note_up("b")
    assert index.find(prompt, None) == {"a": 0, "b": 0}
    assert index.find([7] * 9, None) == {"a": 0, "b": 8}
    index.close()
    for engine in engines.values():
        engine.publisher.close()


@pytest.mark.parametrize("text", ["a", "a=http://x", "=http://x,tcp://y,tcp://z", "a=http://x,y,z,w"])
def test_a_worker_that_is_no_worker(example, text, capsys):
    with pytest.raises(SystemExit):
        example.main(["--worker", text, "prompt"])
    assert re.search(r"expected NAME=URL,EVENTS,REPLAY, got '", capsys.readouterr().err)
