"""Priorities among waiting requests: they order the requests of one salt, and nobody else's."""

import random
from collections import deque

from kvblocks import Sequence
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.turns import Turns


def queue_of(*asked):
    """The queue that requests of (name, salt, priority) make, in which each salt has a place in each round."""
    turns, waiting = Turns(), deque()
    for name, salt, priority in asked:
        turns.place(Request(Sequence(name, [1], salt=salt), 1, priority=priority), waiting)
    return waiting


def names(waiting):
    return [request.sequence.sequence_id for request in waiting]


def test_a_smaller_number_goes_first_and_equal_ones_in_order():
    assert names(queue_of(("a", None, 0), ("b", None, 5), ("c", None, -1), ("d", None, 0))) == ["c", "a", "d", "b"]


def test_a_priority_makes_nobody_else_wait():
    others = [("x1", "x", 0), ("x2", "x", 0)]
    plain = queue_of(("a", "y", 0), *others, ("b", "y", 0), ("c", "y", 0))
    urgent = queue_of(("a", "y", 0), *others, ("b", "y", 0), ("c", "y", -9))
    places = [[index for index, name in enumerate(names(one)) if name[0] == "x"] for one in (plain, urgent)]
    assert places[0] == places[1]
    assert [name for name in names(urgent) if name[0] != "x"] == ["c", "a", "b"]
    rounds = [request.round for request in urgent]
    assert rounds == sorted(rounds)


def test_who_was_admitted_before_keeps_its_place():
    turns, waiting = Turns(), deque()
    preempted = Request(Sequence("old", [1]), 1, priority=7)
    preempted.was_admitted = True
    waiting.append(preempted)
    for name, priority in (("a", 0), ("b", -5)):
        turns.place(Request(Sequence(name, [1]), 1, priority=priority), waiting)
    assert names(waiting) == ["old", "b", "a"]


def test_any_queue_is_in_order_of_rounds_and_each_salt_of_priorities():
    generator = random.Random(3)
    for _ in range(50):
        asked = [(n, generator.choice("xyz"), generator.randrange(-2, 3)) for n in range(30)]
        waiting = queue_of(*asked)
        assert sorted(names(waiting)) == list(range(30))
        rounds = [request.round for request in waiting]
        assert rounds == sorted(rounds)
        for salt in "xyz":
            own = [
                (request.priority, request.sequence.sequence_id) for request in waiting if request.sequence.salt == salt
            ]
            assert own == sorted(own)


def test_samples_have_their_prompts_priority():
    request = Request(Sequence("a", [1, 2]), 4, priority=-3)
    assert request.add_sample("b").priority == -3
