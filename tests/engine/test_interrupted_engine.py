"""Ctrl-C at any line of the engine's code loses no block, no request and no piece, and the engine can still be used."""

import os
import random
from dataclasses import replace

import pytest
import torch

from engine.interrupted_engines import Caller, Interrupts, judge, outcome
from engine.small_models import random_tokens, random_weights
from kvblocks.engine import Engine, LoadedModel, StepLimits

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
}


def run(model, case, *numbers):
    """Run a case with interrupts at these lines. Returns the caller, whose engine is left as it is."""
    script, options = CASES[case]
    caller = Caller(make(model, **options), Interrupts(*numbers))
    script(caller)
    return caller


def expect(model, case):
    """The answers of an undisturbed run, and how many lines that has."""
    caller = run(model, case)
    expected = {name: outcome(pieces) for name, pieces in caller.answers.items()}
    judge(caller, expected)
    return expected, caller.interrupts.num_lines
