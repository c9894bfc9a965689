"""Small traces for the tests of the replay: made by hand, or by hypothesis."""

import os
import time
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from replay.independent import Ask

from kvblocks.replay.run import Setup, run
from kvblocks.replay.trace import Trace, ends_of, think_times

BLOCK_SIZE = 16


def make_trace(asks, *, tenants=None, stops=None) -> Trace:
    """The trace of some `Ask`s. tenants: by session."""
    numbers: dict[object, int] = {}
    prompts = [[numbers.setdefault(name, len(numbers)) for name in ask.chain] for ask in asks]
    sessions = [*dict.fromkeys(ask.session for ask in asks)]
    lengths = np.array([len(prompt) for prompt in prompts])
    return Trace(
        name="made",
        source_format="kvblocks",
        block_size=BLOCK_SIZE,
        blocks=np.array([block for prompt in prompts for block in prompt], np.uint32),
        ends=ends_of(lengths),
        sessions=np.array([sessions.index(ask.session) for ask in asks]),
        times=np.array([float(ask.arrival) for ask in asks]),
        durations=np.array([float(ask.seconds) for ask in asks]),
        thinks=np.array([float(ask.think) for ask in asks]),
        tokens=lengths * BLOCK_SIZE,
        outputs=np.zeros(len(asks), np.int64),
        stops=stops or [""] * len(asks),
        session_names=[str(session) for session in sessions],
        tenants=[None if tenants is None else tenants[session] for session in sessions],
        times_are_relative=False,
    )


class Waiting:
    """Stands for a workload whose jobs are files, each of which says whose process it is until "go" is beside it."""

    def __init__(self, trace, options):
        self.trace, self.options = trace, options

    def do(self, job, progress):
        Path(job).write_text(str(os.getpid()))
        end = time.monotonic() + 60
        while not Path(job).with_name("go").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        return job


def run_trace(trace: Trace, setup: Setup):
    return run(trace, trace.times, think_times(trace), setup)


@st.composite
def chains(draw, max_blocks=6):
    """A path in a small tree: an id is the path to it, as a number in base 4 with a leading 1."""
    name, names = 1, []
    for step in draw(st.lists(st.integers(0, 2), max_size=max_blocks)):
        name = name * 4 + step
        names.append(name)
    return tuple(names)


@st.composite
def asks(draw, max_requests=25, max_blocks=6, max_seconds=6):
    """Requests in the order of their arrival, of up to four sessions."""
    seconds = st.integers(0, max_seconds)
    found, now = [], 0
    for _ in range(draw(st.integers(1, max_requests))):
        now += draw(st.integers(0, 3))
        chain = draw(chains(max_blocks))
        session = draw(st.sampled_from("abcd"))
        found.append(Ask(session, now, draw(st.integers(0, 3)), draw(seconds), chain))
    return found
