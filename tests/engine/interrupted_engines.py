"""Engines that are interrupted at any line of the engine's code: what their callers do, and how the outcome is judged.

A KeyboardInterrupt is raised at the n-th line of `kvblocks/engine` that runs. The caller (`Caller`) then goes on as a
user would: an interrupted `step` is followed by another, an interrupted `cancel` or `submit` is repeated, and what an
interrupted `generate` or stream was to answer is given up. In the end, `judge` compares all answers with those of an
undisturbed run, and looks for what is left in the engine.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import kvblocks.engine
from kvblocks.engine import Engine
from kvblocks.engine.completion import Piece

PACKAGE = str(Path(kvblocks.engine.__file__).parent)


class Interrupts:
    """Raises a KeyboardInterrupt at some lines of the engine's code, by their numbers in the order of running.

    num_lines: how many lines have run. places: where interrupts came, as "file:line". texts: these lines. times: by
    place, the numbers of all times that it was run.
    """

    def __init__(self, *numbers: int) -> None:
        self.numbers = frozenset(numbers)
        self.num_lines = 0
        self.places: list[str] = []
        self.texts: list[str] = []
        self.times: dict[tuple[str, int], list[int]] = {}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Interrupt what runs in this context."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, _event: str, _arg: object) -> Any:
        return self._watch if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _watch(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line":
            self.num_lines += 1
            if not self.numbers:
                self.times.setdefault((frame.f_code.co_filename, frame.f_lineno), []).append(self.num_lines)
            if self.num_lines in self.numbers:
                self.texts.append(getline(frame.f_code.co_filename, frame.f_lineno).strip())
                self.places.append(f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}")
                raise KeyboardInterrupt  # Python then ends the tracing, until `on` is entered again
        return self._watch


@dataclass
class Caller:
    """Somebody who uses an engine in spite of interrupts. answers: the pieces of each answer by name.

    given_up: the names of those that were cancelled or whose stream was interrupted. returned: what steps returned.
    """

    engine: Engine
    interrupts: Interrupts
    answers: dict[str, list[Piece]] = field(default_factory=dict)
    generations: dict[str, Any] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)
    returned: list[Any] = field(default_factory=list)

    def call(self, function: Callable[[], Any]) -> tuple[Any, bool]:
        """Call a function of the engine. Returns its result, and whether it was interrupted."""
        try:
            with self.interrupts.on():
                return function(), False
        except KeyboardInterrupt:
            return None, True

    def submit(self, name: str, prompt: Any, **options: Any) -> None:
        """Submit a prompt until that isn't interrupted. An interrupted call mostly queues nothing."""
        is_interrupted = True
        while is_interrupted:
            generations, is_interrupted = self.call(lambda: self.engine.submit(prompt, **options))
        for number, generation in enumerate(generations):
            self.generations[f"{name}.{number}"] = generation
            self.answers[f"{name}.{number}"] = []

    def step(self) -> None:
        """Take a step, which may be interrupted, and all pieces."""
        returned, _ = self.call(self.engine.step)
        self.returned += returned or []
        for name, generation in self.generations.items():
            while generation.pieces:
                self.answers[name].append(generation.pieces.popleft())

    def step_until(self, name: str, num_pieces: int) -> None:
        """Step until an answer has so many pieces, or ends."""
        while len(self.answers[name]) < num_pieces and self.generations[name].finish_reason is None:
            self.step()

    def cancel(self, name: str) -> None:
        """Cancel a generation until that isn't interrupted."""
        self.given_up.add(name)
        while self.call(lambda: self.engine.cancel(self.generations[name]))[1]:
            pass

    def generate(self, name: str, prompts: Any, **options: Any) -> None:
        """Have prompts answered, or give them up."""
        completions, is_interrupted = self.call(lambda: self.engine.generate(prompts, **options))
        if is_interrupted:
            self.given_up.add(name)
            return
        self.answers[name] = [Piece(number, 0, "", completion) for number, completion in enumerate(completions)]

    def take(self, name: str, stream: Iterator[Piece], num_pieces: int) -> None:
        """Take so many pieces of a stream, or fewer if it ends or is interrupted."""
        for _ in range(num_pieces):
            piece, is_interrupted = self.call(lambda: next(stream, None))
            if is_interrupted:
                self.given_up.add(name)
            if piece is None:
                return
            self.answers.setdefault(name, []).append(piece)

    def close(self, name: str, stream: Any) -> None:
        """Close a stream, which may be interrupted."""
        self.given_up.add(name)
        self.call(stream.close)

    def finish(self) -> None:
        """Step until the engine has nothing to do, and once more."""
        while self.engine.has_work:
            self.step()
        self.step()


def unfinished(engine: Engine) -> list[Any]:
    """The generations that an engine holds."""
    return list(engine.stepper._generations.values())  # noqa: SLF001


def outcome(pieces: list[Piece]) -> list[Any]:
    """All of an answer but its times and what it cost."""
    found: list[Any] = []
    for piece in pieces:
        whole = piece.completion
        end = None if whole is None else (whole.text, whole.token_ids, whole.finish_reason, whole.logprobs)
        scores = None if whole is None else whole.prompt_logprobs
        found.append((piece.prompt_index, piece.sample_index, piece.token_id, piece.text, piece.logprobs, end, scores))
    return found


def judge(caller: Caller, expected: dict[str, list[Any]]) -> None:
    """Raise AssertionError if an interrupted run has lost, kept or changed anything. Closes the engine."""
    engine = caller.engine
    scheduler = engine.scheduler
    assert not scheduler.running and not scheduler.waiting and not scheduler.entrance.held, "left in the queue"
    assert not unfinished(engine), "ghosts"
    assert not engine.stepper._streams, "ghosts of streams"  # noqa: SLF001
    if scheduler.remembered is not None:
        scheduler.remembered.check()
    engine.manager.check()
    engine.close()
    assert engine.manager.num_free_blocks == engine.manager.num_blocks, "lost blocks"
    for name, wanted in expected.items():
        found = outcome(caller.answers.get(name, []))
        if name in caller.given_up:
            tokens, others = ([one[2] for one in pieces] for pieces in (found, wanted))
            length = min(len(tokens), len(others))  # it may have been given up earlier or later
            assert tokens[:length] == others[:length], f"{name}: other tokens"
            continue
        assert found == wanted, f"{name}: {found}, not {wanted}"
    for name, generation in caller.generations.items():
        assert generation.finish_reason is not None, f"{name}: no end"
        assert not generation.pieces
        was_returned = generation in caller.returned or name in caller.given_up
        assert was_returned or "return told" in caller.interrupts.texts, f"{name}: not returned"
