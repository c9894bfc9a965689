"""The interface between the walk and a block manager."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Slot = Hashable
"""Identifies the memory for the KV of one token: `block_id * block_size + offset`, or whatever an engine uses."""


@dataclass(eq=False)
class WalkRequest:
    """A prompt and what follows. The walk appends to `token_ids`.

    name: unique in a walk. token_ids: all known tokens. salt: requests with different salts share no KV. num_tokens:
    how many leading tokens have slots. num_written: how many of those were written by completed steps; 0 before the
    first one. state: for the adapter's own use, such as the engine's request object.
    """

    name: str
    token_ids: list[int]
    salt: str | None = None
    num_tokens: int = 0
    num_written: int = 0
    state: Any = field(default=None, repr=False)


class CacheAdapter(ABC):
    """A block manager, as the walk calls it. Make a subclass that translates the calls.

    It is constructed with `num_blocks`, for a new pool. block_size: tokens per block. num_slots: tokens that fit into
    the pool. has_salts: whether it keeps salts apart; if not, the walk uses none. finds_all: whether a lookup finds
    every full block that an ended request has computed, as long as nothing was evicted; the walk then reports missed
    hits.
    """

    block_size: int
    num_slots: int
    has_salts = True
    finds_all = True

    @abstractmethod
    def start(self, request: WalkRequest, num_new_tokens: int) -> int | None:
        """Look up a request without slots, and give slots to its hit and to `num_new_tokens` more of its tokens.

        Return the length of the hit: the number of leading tokens that aren't computed, since their slots already hold
        their KV. If fewer tokens are left, all of them get slots. Return None, with nothing changed, if there is no
        room.
        """

    @abstractmethod
    def grow(self, request: WalkRequest, num_tokens: int) -> bool:
        """Give slots to the first `num_tokens` tokens of a request, which the next step writes.

        That is more than have slots now, and all are in `request.token_ids`. Return False, with nothing changed, if
        there is no room.
        """

    @abstractmethod
    def slots(self, request: WalkRequest) -> Sequence[Slot]:
        """Return the slots of a request's tokens, by position, at least those that `start` and `grow` promised."""

    @abstractmethod
    def free(self, request: WalkRequest) -> None:
        """End a request. All its tokens with slots have been computed."""

    def end_step(self) -> None:  # noqa: B027  # not every manager needs to hear it
        """Note that a step ran, so everything that has slots is written.

        For managers that cache blocks after the step.
        """

    def take_copies(self) -> Iterable[tuple[Slot, Slot]]:
        """Return the copies, (source, destination), that the next step makes before it computes.

        Return each copy once.
        """
        return ()

    def fail_step(self, requests: Iterable[WalkRequest]) -> bool:
        """End the requests of a failed step, in order. The step has written nothing of what it should have written.

        Return False, the default, if the manager has no call for that. Then the walk's steps never fail.
        """
        del requests
        return False

    def reset(self) -> bool:
        """Forget everything that is cached, as an engine does when its weights change. Called while nothing runs.

        Return False, the default, if the manager has no call for that.
        """
        return False

    def num_free_slots(self) -> int | None:
        """Return the most tokens that a new request could get, or None, the default, if the manager can't say."""
        return None

    def check(self) -> None:  # noqa: B027  # not every manager can check itself
        """Raise if the manager's own invariants don't hold. The default does nothing."""
