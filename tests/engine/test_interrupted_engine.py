"""Ctrl-C at any line of the engine's code loses no block, no request and no piece, and the engine can still be used."""

import gc
import os
import random
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch

from engine.interrupted_engines import Caller, Interrupts, judge, outcome, unfinished
from engine.small_models import random_tokens
from kvblocks.engine import Engine, LoadedModel, StepLimits
from kvblocks.errors import CorruptStateError

STRIDE = 1 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 29
NUM_BLOCKS = 64
GREEDY = {"max_tokens": 4, "ignore_eos": True}
DRAWN = {**GREEDY, "temperature": 1.0, "seed": 1}


@pytest.fixture(scope="module")
def model(tiny_folder):
    torch.set_num_threads(1)
    return LoadedModel.load(tiny_folder)


def make(model, **options):
    limits = options.pop("limits", StepLimits(48, 8))
    engine = Engine(model, deterministic=True, **{"num_blocks": NUM_BLOCKS, "block_size": 4, **options})
    engine.limits = limits
    return engine


def prompt_of(caller, length, seed):
    return random_tokens(caller.engine.model.config, length, seed=seed)


# What callers do. Each function is one history of calls, which `finish` ends.


def submits(caller):
    """Samples, penalties, log probabilities, a stop string, a prompt to score, one without an answer, a timeout."""
    shared = prompt_of(caller, 9, 1)
    caller.submit("greedy", [*shared, 5], **GREEDY)
    caller.submit("samples", [*shared, 6], **DRAWN, n=3)
    caller.step()
    caller.submit("logs", [*shared, 7], **DRAWN, logprobs=2, repetition_penalty=1.2)
    caller.submit("scored", prompt_of(caller, 11, 2), **GREEDY, prompt_logprobs=1)
    caller.submit("warm", prompt_of(caller, 6, 3), max_tokens=0)
    caller.submit("stops", prompt_of(caller, 7, 4), **GREEDY | {"max_tokens": 6}, stop=["zz", "e"])
    caller.submit("late", prompt_of(caller, 5, 5), **GREEDY, timeout_s=1e-9)
    caller.finish()


def cancels(caller):
    """Requests that are cancelled in the queue, while they run, and the first and another one of several samples."""
    for name in ("first", "second", "third"):
        caller.submit(name, prompt_of(caller, 10, len(name)), **GREEDY)
    caller.cancel("second.0")
    caller.step_until("first.0", 2)
    caller.cancel("first.0")
    caller.submit("pair", prompt_of(caller, 70, 9), **DRAWN, n=3)
    caller.step()
    caller.cancel("pair.0")
    caller.cancel("pair.2")
    caller.finish()


def preempted(caller):
    """More than the pool has room for."""
    for number in range(4):
        caller.submit(f"one {number}", prompt_of(caller, 9, number), **GREEDY | {"max_tokens": 9})
    caller.finish()


def repeated(caller):
    """Prompts whose next token is remembered."""
    prompt = prompt_of(caller, 10, 1)
    caller.submit("first", prompt, **GREEDY)
    caller.finish()
    caller.submit("again", prompt, **GREEDY)
    caller.submit("once more", prompt, **GREEDY | {"max_tokens": 1})
    caller.submit("other", prompt_of(caller, 9, 2), **GREEDY)
    caller.finish()


def sessions(caller):
    """Requests of three sessions, of which two fit."""
    for number in range(3):
        caller.submit(f"turn {number}", prompt_of(caller, 12, number), **GREEDY, session=f"session {number}")
    caller.step()
    caller.cancel("turn 2.0")
    caller.submit("next", prompt_of(caller, 14, 7), **GREEDY, session="session 0", n=2)
    caller.finish()


def long(caller):
    """Long prompts, which are computed by layers where the model has several, beside short ones."""
    caller.submit("long", prompt_of(caller, 70, 1), **GREEDY)
    caller.submit("short", prompt_of(caller, 5, 2), **GREEDY)
    caller.step()
    caller.submit("also long", prompt_of(caller, 60, 3), **GREEDY)
    caller.finish()


def streams(caller):
    """Two streams that are open at once beside a submitted prompt; one of them is closed."""
    prompts = [prompt_of(caller, 9, seed) for seed in range(3)]
    caller.submit("beside", prompts[0], **GREEDY | {"max_tokens": 8})
    one = caller.engine.stream(prompts[:2], **DRAWN, n=2)
    other = caller.engine.stream(prompts[2:], **GREEDY)
    caller.take("one", one, 3)
    caller.take("other", other, 99)
    caller.close("one", one)
    caller.finish()


def generates(caller):
    """A call of `generate` beside a submitted prompt."""
    caller.submit("beside", prompt_of(caller, 9, 1), **GREEDY | {"max_tokens": 8})
    caller.step()
    caller.generate("call", [prompt_of(caller, 9, 2), prompt_of(caller, 10, 3)], **DRAWN, n=2)
    caller.finish()


def evicted(caller):
    """Prompts whose blocks come back from a tier."""
    prompts = [prompt_of(caller, 13, seed) for seed in range(3)]
    for number, prompt in enumerate([*prompts, *prompts]):
        caller.submit(f"one {number}", prompt, **GREEDY)
        caller.finish()


LONG = StepLimits(32, 4, 8)
CASES = {
    "submits": (submits, {}),
    "submits, overlapped": (submits, {"overlap": True}),
    "cancels": (cancels, {}),
    "cancels, overlapped": (cancels, {"overlap": True}),
    "preempted": (preempted, {"num_blocks": 9}),
    "preempted, overlapped": (preempted, {"num_blocks": 9, "overlap": True}),
    "grouped": (preempted, {"num_blocks": 9, "schedule": "grouped"}),
    "repeated": (repeated, {"remember_next_token": True}),
    "sessions": (sessions, {"session_gate": True, "num_blocks": 9}),
    "long": (long, {"limits": LONG}),
    "streams": (streams, {}),
    "streams, overlapped": (streams, {"overlap": True}),
    "generates": (generates, {}),
    "generates, overlapped": (generates, {"overlap": True}),
    "evicted": (evicted, {"num_blocks": 9, "tiers": ["host:1MiB"]}),
}


def expect(model, case):
    """The answers of an undisturbed run, and when each of its lines runs."""
    caller = Caller(make(model, **CASES[case][1]), Interrupts())
    CASES[case][0](caller)
    expected = {name: outcome(pieces) for name, pieces in caller.answers.items()}
    judge(caller, expected)
    return expected, caller.interrupts


# --- any line --------------------------------------------------------------------------------------------------------


def check_at(model, case, expected, *numbers):
    """Interrupt a case at these lines, and judge it. The message of a failure says where the interrupts came."""
    caller = Caller(make(model, **CASES[case][1]), Interrupts(*numbers))
    try:
        CASES[case][0](caller)
        judge(caller, expected)
    except Exception as error:
        raise AssertionError(f"{case}: interrupted at {numbers}, {caller.interrupts.places}: {error}") from error
    if "tiers" not in CASES[case][1]:  # with these, each run waits in its own way
        assert caller.interrupts.places


@pytest.mark.every(5)
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_some_lines_loses_nothing(model, case):
    """One line, or two, so that the second one may come while the first one's traces are removed."""
    expected, undisturbed = expect(model, case)
    rng = random.Random(case)
    first = rng.randrange(1, undisturbed.num_lines)
    check_at(model, case, expected, first, first + rng.randrange(1, 400))


@pytest.mark.exhaustive
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_any_line_loses_nothing(model, case):
    """At the first, a middle and the last time that a line runs; a third of them with a second one soon after."""
    expected, undisturbed = expect(model, case)
    numbers = {at for times in undisturbed.times.values() for at in (times[0], times[len(times) // 2], times[-1])}
    rng = random.Random(case)
    for place, first in enumerate(sorted(numbers)[rng.randrange(STRIDE) :: STRIDE]):
        check_at(model, case, expected, first, *([] if place % 3 else [first + rng.randrange(1, 400)]))


# --- single faults ---------------------------------------------------------------------------------------------------


def interrupt_behind(monkeypatch, owner, name):
    """Have the next call of a method do its work, and then raise a KeyboardInterrupt."""
    works = getattr(owner, name)

    def interrupted(*given, **options):
        monkeypatch.setattr(owner, name, works)
        works(*given, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


def die(*given):
    raise RuntimeError("the step died")


def interrupt(*given):
    raise KeyboardInterrupt


def answer_two(model, **options):
    """An engine with two prompts under way, their generations, and what they are to be answered."""
    prompts = [random_tokens(model.config, 9, seed=seed) for seed in range(2)]
    expected = [one.token_ids for one in make(model).generate(prompts, **GREEDY)]
    engine = make(model, **options)
    generations = [engine.submit(prompt, **GREEDY)[0] for prompt in prompts]
    return engine, generations, expected


def finish(engine):
    while engine.has_work:
        engine.step()
    engine.manager.check()
    assert engine.manager.num_free_blocks == engine.manager.num_blocks
    assert not unfinished(engine)


def test_an_interrupt_within_an_abort_leaves_nobody_running_without_blocks(model, monkeypatch):
    engine, generations, expected = answer_two(model)
    engine.step()
    for generation in generations:
        generation.is_submitted = False  # their step is undone, and computed again
    monkeypatch.setattr(engine.runner, "run", die)
    interrupt_behind(monkeypatch, engine.manager, "abort")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    assert all(request.sequence.is_allocated for request in engine.scheduler.running)
    finish(engine)
    assert [[piece.token_id for piece in one.pieces] for one in generations] == expected


@pytest.mark.parametrize("where", ["before its blocks are free", "behind the scheduler's part"])
def test_an_interrupted_cancel_leaves_no_ghost(model, where, monkeypatch):
    engine, (gone, stays), expected = answer_two(model)
    engine.step()
    if where == "before its blocks are free":
        interrupt_behind(monkeypatch, engine.scheduler.lookups, "forget")
    else:
        interrupt_behind(monkeypatch, engine.scheduler, "cancel")
    with pytest.raises(KeyboardInterrupt):
        engine.cancel(gone)
    engine.step()
    assert unfinished(engine) == [stays]
    assert gone.finish_reason == "cancelled"
    finish(engine)
    assert stays.completion.token_ids == expected[1]


@pytest.mark.parametrize("is_later", [False, True])
def test_no_token_is_told_twice_if_the_text_of_one_cannot_be_decoded(model, is_later, monkeypatch):
    """That is the second token of one of two. The interrupt comes in that step, or in the one behind it."""
    engine, (bad, good), expected = answer_two(model)
    bad.is_submitted = False
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(bad._decoder, "feed", die)  # noqa: SLF001
        if is_later:
            engine.step()
            patch.undo()
        interrupt_behind(patch, engine.scheduler, "complete")
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    finish(engine)
    assert [piece.token_id for piece in good.pieces] == expected[1]
    assert [piece.token_id for piece in bad.pieces] == expected[0][:1]
    assert (bad.finish_reason, str(bad.error)) == ("error", "the step died")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("number", [1, 3, 4])
def test_an_interrupt_behind_complete_loses_no_piece(model, overlap, number, monkeypatch):
    """The requests have their tokens, which nobody was told of."""
    engine, generations, expected = answer_two(model, overlap=overlap)
    for _ in range(number - 1 + overlap):
        engine.step()
    interrupt_behind(monkeypatch, engine.scheduler, "complete")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    ended = []
    while engine.has_work:
        ended += [one for one in engine.step() if one.finish_reason is not None]
    assert [[piece.token_id for piece in one.pieces] for one in generations] == expected
    assert ["".join(piece.text for piece in one.pieces) for one in generations] == [one.text for one in generations]
    assert ended == generations
    finish(engine)


def test_an_interrupted_submit_queues_nothing(model, monkeypatch):
    """Neither one of several samples, nor a request without a generation, which no step could go on with."""
    engine, generations, expected = answer_two(model)
    engine.step()
    interrupt_behind(monkeypatch, engine.scheduler, "add_checked")
    with pytest.raises(KeyboardInterrupt):
        engine.submit([1, 2, 3], **GREEDY, n=2)
    assert unfinished(engine) == generations
    finish(engine)
    assert [one.completion.token_ids for one in generations] == expected


def test_what_a_step_has_told_is_returned_by_the_next_one(model, monkeypatch):
    """The interrupt comes behind the step itself, as when the engine waits for a transfer."""
    engine, generations, _ = answer_two(model)
    engine.step()
    interrupt_behind(monkeypatch, engine.metrics, "observe")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.step() == generations
    for _ in range(1):
        interrupt_behind(monkeypatch, engine.metrics, "observe")
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.has_work and all(one.finish_reason == "length" for one in generations)
    assert engine.step() == generations
    assert not engine.has_work


def test_a_second_interrupt_while_a_call_is_dropped_leaves_no_ghost(model, monkeypatch):
    """Whoever presses Ctrl-C twice interrupts the end of `generate`, too."""
    engine, generations, expected = answer_two(model)
    monkeypatch.setattr(engine.runner, "run", interrupt)
    interrupt_behind(monkeypatch, engine.scheduler, "cancel")
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3], [4, 5]], **GREEDY, n=2)
    monkeypatch.undo()
    engine.step()
    assert unfinished(engine) == generations
    finish(engine)
    assert [one.completion.token_ids for one in generations] == expected


def test_nobody_looks_at_the_queue_before_it_is_repaired(model, monkeypatch):
    """Such as the one who asks a shared store for what waits. The repair is interrupted, too."""
    engine, _, _ = answer_two(model, tiers=["host:1MiB"])
    engine.step()
    looks = []
    monkeypatch.setattr(engine.offload, "seek", lambda scheduler: looks.append(holding(scheduler)))

    def holding(scheduler):
        return [request for request in (*scheduler.waiting, *scheduler.running) if request.sequence.is_allocated]

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", interrupt)
        interrupt_behind(patch, engine.manager, "abort")
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert holding(engine.scheduler)
    engine.step()
    assert len(looks[0]) == 2 and looks[1] == []
    engine.close()


def test_an_interrupted_timeout_still_ends_its_request(model, monkeypatch):
    engine, generations, expected = answer_two(model)
    (late,) = engine.submit([1, 2, 3], **GREEDY, timeout_s=1e-9)
    interrupt_behind(monkeypatch, engine.scheduler, "expire")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert late in engine.step()
    assert late.finish_reason == "timeout"
    finish(engine)
    assert [one.completion.token_ids for one in generations] == expected


@pytest.mark.parametrize("where", ["behind take_transfers", "behind begin", "before begin", "before complete"])
def test_an_interrupt_loses_no_transfer(model, where, monkeypatch):
    """A transfer that nobody carries out, or reports, would keep its blocks for ever."""
    engine, _, _ = answer_two(model, tiers=["host:1MiB"])
    carrier, tiers = engine.offload._carriers["host"], engine.manager.tiers  # noqa: SLF001
    place, name = where.split()
    owner = carrier if name == "begin" else tiers
    works, interrupts = getattr(owner, name), []

    def interrupted(*given, **options):
        result = works(*given, **options) if place == "behind" else None
        if result != [] and not interrupts:
            interrupts.append(given)
            raise KeyboardInterrupt
        return works(*given, **options) if place == "before" else result

    monkeypatch.setattr(owner, name, interrupted)
    end_s = time.monotonic() + 60
    while engine.has_work:
        with suppress(KeyboardInterrupt):
            engine.step()
        assert time.monotonic() < end_s, "some transfer never ends"
    assert interrupts
    assert engine.manager.num_free_blocks == engine.manager.num_blocks
    assert tiers.num_stale_answers == 0
    engine.close()


def test_an_interrupt_leaves_no_lock_that_transfers_wait_for(model):
    """It may come in the standard library, such as behind the line of `threading.Event` that takes its lock."""
    engine, _, _ = answer_two(model, tiers=["host:1MiB"])

    def break_in(frame, event, _):
        return within if frame.f_code.co_qualname == "Condition.__enter__" else None

    def within(frame, event, _):
        if event == "return":
            raise KeyboardInterrupt
        return within

    before = sys.gettrace()
    sys.settrace(break_in)
    try:
        engine.offload.advance()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    thread = threading.Thread(target=engine.offload.advance, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    finish(engine)
    engine.close()


def test_an_interrupt_within_a_call_of_the_manager_is_heard_and_then_the_engine_refuses(model, monkeypatch):
    engine, generations, _ = answer_two(model)
    engine.step()

    def interrupted(*given):
        engine.manager._change.begin()  # noqa: SLF001  # as if it had come in the middle of a change
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3], [4, 5]], **GREEDY, session="a session")
    with pytest.raises(CorruptStateError, match="got one where an exception"):
        engine.step()
    for generation in generations:
        engine.cancel(generation)
    assert not engine.has_work


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stream_that_the_garbage_collector_ends_within_a_step_changes_nobody_else(model, overlap, monkeypatch):
    engine, generations, expected = answer_two(model)
    engine.stepper.overlaps = overlap
    streams = [engine.stream([[1, 2, number]], **GREEDY | {"max_tokens": 20}) for number in (3, 4)]
    for stream in streams:
        next(stream)
    streams.append(streams)  # only the garbage collector can free them
    del stream, streams
    run, num_held = engine.runner.run, 0

    def collect(*chunks):
        nonlocal num_held
        gc.collect()
        num_held = len(unfinished(engine))
        return run(*chunks)

    monkeypatch.setattr(engine.runner, "run", collect)
    engine.step()
    monkeypatch.undo()
    assert num_held == 4
    finish(engine)
    assert [one.completion.token_ids for one in generations] == expected
