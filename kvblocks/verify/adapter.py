"""What the walk asks of a block manager, and what it asks about."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Slot = Hashable
"""Memory for the KV of one token: `block_id * block_size + offset`, or whatever an engine has."""


@dataclass(eq=False)
class WalkRequest:
    """A prompt and what follows. The walk appends to `token_ids`.

    name: unique in a walk. token_ids: all tokens that are known. salt: requests of different salts share no KV.
    num_tokens: so many first tokens have slots. num_written: so many of them were written by steps that ran; 0 before
    the first one. state: the adapter's own, such as the engine's request object.
    """

    name: str
    token_ids: list[int]
    salt: str | None = None
    num_tokens: int = 0
    num_written: int = 0
    state: Any = field(default=None, repr=False)


class CacheAdapter(ABC):
    """A block manager, as the walk calls it. A subclass translates; it is made with `num_blocks`, for a new pool.

    block_size: tokens a block. num_slots: tokens that fit the pool. has_salts: whether it keeps salts apart; without,
    the walk uses none. finds_all: whether a lookup finds every full block that an ended request has computed, while
    nothing was evicted; the walk then reports hits that are missed.
    """

    block_size: int
    num_slots: int
    has_salts = True
    finds_all = True

    @abstractmethod
    def start(self, request: WalkRequest, num_new_tokens: int) -> int | None:
        """Look up a request that has no slots, and give its hit and `num_new_tokens` more of its tokens slots.

        Return the length of the hit: so many of its first tokens aren't computed, since their slots hold their KV. If
        fewer tokens are left, all have slots. None: there is no room, and nothing has changed.
        """

    @abstractmethod
    def grow(self, request: WalkRequest, num_tokens: int) -> bool:
        """Give the first `num_tokens` tokens of a request slots, which the next step writes.

        They are more than have slots, and all are in `request.token_ids`. False: there is no room, nothing has changed.
        """

    @abstractmethod
    def slots(self, request: WalkRequest) -> Sequence[Slot]:
        """Return the slots of a request's tokens, by position; at least those that `start` and `grow` promised."""

    @abstractmethod
    def free(self, request: WalkRequest) -> None:
        """End a request. All its tokens with slots have been computed."""

    def end_step(self) -> None:  # noqa: B027  # not every manager needs to hear it
        """Hear that a step ran: everything that has slots is written. For managers that cache blocks after the step."""

    def take_copies(self) -> Iterable[tuple[Slot, Slot]]:
        """Return the copies, (source, destination), that the next step makes before it computes. Each is told once."""
        return ()

    def fail_step(self, requests: Iterable[WalkRequest]) -> bool:
        """End the requests of a step that died, in their order. It has written nothing of what it was to write.

        False, which is the default: this manager has no call for that, so the walk's steps never die.
        """
        del requests
        return False

    def reset(self) -> bool:
        """Forget all that is cached, as an engine does whose weights change. The walk does it while nothing runs.

        False, which is the default: this manager has no call for that.
        """
        return False

    def num_free_slots(self) -> int | None:
        """Return how many tokens a new request could get at most, or None, which is the default: it can't be asked."""
        return None

    def check(self) -> None:  # noqa: B027  # not every manager can check itself
        """Raise if the manager's own invariants don't hold. The default does nothing."""
