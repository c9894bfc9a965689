"""A call that was left half done is noticed: the object refuses further calls, or is as before or after the call.

In the plain build a KeyboardInterrupt comes at the package's opcodes: at each of them with HYPOTHESIS_PROFILE=thorough,
at a share of them otherwise. The compiled build has none, so there the caller's own functions raise.
"""

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
from model.interrupted_caches import CALLS, make_cache_case
from model.interrupted_managers import KINDS, PROMPT, make_case, names_of
from model.interruption import interrupt_everywhere

import kvblocks
from kvblocks import CorruptStateError, KVCacheManager, PrefixCache, Sequence

VERDICTS = {"refuses", "before", "after"}
STRIDE = {"thorough": 1, "whole": 149}.get(os.environ.get("HYPOTHESIS_PROFILE", ""), 307)
plain_only = pytest.mark.skipif(kvblocks.__compiled__, reason="compiled functions have no opcodes to trace")


@plain_only
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_manager_refuses_or_is_consistent(kind: str) -> None:
    seen: set[str] = set()
    for number, name in enumerate(names_of(kind)):
        first = 1 + 7 * number % STRIDE  # not the same opcodes of all calls
        verdicts = interrupt_everywhere(lambda name=name: make_case(kind, name), CorruptStateError, first, STRIDE)
        assert verdicts.keys() <= VERDICTS, f"{kind}, {name}: {verdicts}"
        seen |= verdicts.keys()
    assert seen == VERDICTS


@pytest.fixture
def collected():
    """Collect a test's garbage while the test's marks still apply."""
    yield
    gc.collect()


@plain_only
@pytest.mark.usefixtures("collected")
@pytest.mark.filterwarnings("ignore:Exception ignored in.*PrefixMatch.__del__:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("eviction", [None, "slru"])
def test_an_interrupted_cache_refuses_or_is_consistent(eviction: str | None) -> None:
    seen: set[str] = set()
    stride = min(STRIDE, 7 if eviction is None else 29)
    for number, name in enumerate(CALLS):
        first = 1 + number % stride
        verdicts = interrupt_everywhere(
            lambda name=name: make_cache_case(name, eviction), CorruptStateError, first, stride
        )
        assert verdicts.keys() <= VERDICTS, f"{name}: {verdicts}"
        seen |= verdicts.keys()
    assert seen == VERDICTS


class Clock:
    """A clock that is interrupted when it is told so."""

    is_interrupted = False

    def __call__(self) -> float:
        if self.is_interrupted:
            raise KeyboardInterrupt
        return 0.0


def start(manager: KVCacheManager, name: Any, tokens: list[int]) -> Sequence:
    sequence = Sequence(name, tokens)
    assert manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence)) is not None
    return sequence


@pytest.mark.parametrize(
    "call",
    [
        lambda manager, running: manager.allocate_slots(Sequence("new", range(40, 52))),
        lambda manager, running: manager.append_slots(running, [1, 2, 3, 4, 5]),
        lambda manager, running: manager.append_slots(manager_at_edge(manager, running), [1]),
        lambda manager, running: manager.append_step([manager_at_edge(manager, running)], [1]),
        lambda manager, running: manager.allocate_slots(running, 0, num_total_tokens=running.num_tokens + 9),
        lambda manager, running: manager.free(running),
        lambda manager, running: manager.abort(running, 0),
        lambda manager, running: manager.fork(running, "child"),
        lambda manager, running: manager.pins.pin(PROMPT[:4]),
    ],
)
def test_a_clock_that_raises_in_the_middle_of_a_call_is_known(call: Callable[[Any, Any], Any]) -> None:
    clock = Clock()
    manager = KVCacheManager(16, 4)
    manager._start_sampling(1, clock, (1.0,))  # noqa: SLF001
    running, untouched = start(manager, "running", PROMPT[:6]), start(manager, "untouched", [7, 7, 7, 7, 7])
    clock.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        call(manager, running)
    clock.is_interrupted = False
    for refused in (
        manager.check,
        manager.take_copies,
        lambda: manager.get_computed_blocks(Sequence("probe", PROMPT)),
        lambda: manager.allocate_slots(Sequence("probe", PROMPT)),
        lambda: manager.append_slots(untouched, [8]),
        lambda: manager.append_step([untouched], [8]),
        lambda: manager.free(untouched),
    ):
        with pytest.raises(CorruptStateError, match=r"expected a manager none of whose calls was left half done, got"):
            refused()
    assert untouched.token_ids() == [7, 7, 7, 7, 7]
    assert manager.stats.num_blocks == 16  # what only counts is for watchers, who may ask in the middle of a call
    other = KVCacheManager(16, 4)
    with pytest.raises(kvblocks.SequenceStateError):
        other.allocate_slots(untouched)
    start(other, "untouched", untouched.token_ids())
    other.check()


def manager_at_edge(manager: KVCacheManager, sequence: Sequence) -> Sequence:
    """Return the sequence once its next token needs a block."""
    while sequence.num_tokens % manager.block_size:
        assert manager.append_slots(sequence, [1]) == []
    return sequence


def test_a_hash_function_that_raises_harms_nothing() -> None:
    is_interrupted = False

    def digest(data: bytes) -> bytes:
        if is_interrupted:
            raise KeyboardInterrupt
        return len(data).to_bytes(8, "little")

    manager = KVCacheManager(16, 4, hash_algorithm=digest, enable_events=True)
    running, other = start(manager, "running", PROMPT[:6]), start(manager, "other", [7, 7, 7])
    new = Sequence("new", PROMPT)
    hit = manager.get_computed_blocks(new)
    is_interrupted = True
    for call in (
        lambda: manager.allocate_slots(new, hit=hit),
        lambda: manager.append_slots(running, [1, 2, 3]),
        lambda: manager.append_step([running, other], [1, 2]),
    ):
        with pytest.raises(KeyboardInterrupt):
            call()
        manager.check()
    assert (running.num_tokens, other.num_tokens, new.is_allocated) == (6, 3, False)
    is_interrupted = False
    assert manager.allocate_slots(new, hit=hit) is not None
    assert manager.append_step([running, other], [1, 2]) == []
    manager.check()


class Token:
    """A token whose `__index__` raises, or interrupts."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __index__(self) -> int:
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ZeroDivisionError])
def test_a_token_that_raises_harms_nothing(error: type[BaseException]) -> None:
    manager = KVCacheManager(16, 4)
    batch = [start(manager, name, [name] * (5 + name)) for name in range(4)]
    for call in (
        lambda: manager.append_slots(batch[0], [Token(error)]),
        lambda: manager.append_slots(batch[0], [1, Token(error)]),
        lambda: manager.append_step(batch, [1, 2, Token(error), 4]),
        lambda: manager.append_step(batch, [1, 2, 3, Token(error)]),
    ):
        with pytest.raises(error):
            call()
        manager.check()
        assert [sequence.num_tokens for sequence in batch] == [5, 6, 7, 8]
    assert manager.append_step(batch, [1, 2, 3, 4]) == [(3, 0, 2, 8)]
    manager.check()


class Name:
    """A sequence's id whose n-th lookup from now is interrupted."""

    def __init__(self) -> None:
        self.num_left = -1

    def __hash__(self) -> int:
        self.num_left -= 1
        if not self.num_left:
            raise KeyboardInterrupt
        return 7


@pytest.mark.parametrize("groups", [None, [kvblocks.FullAttention(4), kvblocks.SlidingWindow(4, 6)]])
def test_a_name_that_raises_harms_nothing(groups: Any) -> None:
    """An id's `__hash__` runs before anything changes, and not again."""
    verdicts: dict[str, set[str]] = {}
    for call in ("allocate_slots", "free", "abort", "fork"):
        num_left = 1
        while True:
            manager = KVCacheManager(32, None if groups else 4, groups=groups)
            name = Name()
            new, free = Sequence(name, PROMPT), manager.num_free_blocks
            if call in ("free", "abort"):
                manager.allocate_slots(new)
                free = manager.num_free_blocks
            source = start(manager, "source", [1, 2, 3, 4, 5]) if call == "fork" else None
            free = manager.num_free_blocks
            name.num_left = num_left
            try:
                if source is not None:
                    manager.fork(source, name)
                elif call == "abort":
                    manager.abort(new, 4)
                else:
                    getattr(manager, call)(new)
            except KeyboardInterrupt:
                pass
            else:
                break
            name.num_left = -1
            try:
                manager.check()
            except CorruptStateError:
                verdict = "refuses"
            else:
                assert manager.num_free_blocks == free
                verdict = "before"
            verdicts.setdefault(call, set()).add(verdict)
            num_left += 1
    assert verdicts == {call: {"before"} for call in ("allocate_slots", "free", "abort", "fork")}


def test_a_call_in_the_middle_of_another_is_refused() -> None:
    """A call by a finalizer or a signal handler. The manager works again once the interrupted call has ended."""
    manager = KVCacheManager(16, 4)
    refused = []

    running = Sequence("running", PROMPT)

    def now() -> float:
        try:
            if manager.stats.num_taken_blocks:  # not when the clock is tried
                manager.free(running)
        except CorruptStateError as error:
            refused.append(error)
        return float(manager.stats.num_taken_blocks)

    manager._start_sampling(1, now, (1.0,))  # noqa: SLF001
    assert manager.allocate_slots(running) is not None
    assert len(refused) == 1
    manager.check()
    assert running.is_allocated


def test_a_payload_that_dies_may_call_the_cache() -> None:
    """Payloads are finalized only after the change has ended."""
    cache = PrefixCache(2, 4)
    seen = []

    class Payload:
        def __del__(self) -> None:
            seen.append(cache.cached_block_count())

    cache.insert_prefix(PROMPT[:8], [0, 1])
    cache.attach(PROMPT[:8], Payload())
    cache.insert_prefix(range(50, 58), [2, 3])
    assert seen == [2]
    cache.attach(range(50, 58), Payload())
    cache.evict(1)
    assert seen == [2, 1]
    cache.check()
