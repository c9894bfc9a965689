"""What a `SessionGate` says: who was admitted, who waits and why, and its numbers."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

SessionKey = tuple[str | None, Hashable]
"""A session: the salt of its requests, and its name."""

Reason = Literal["next", "room", "idle", "behind", "turn"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the gate decided.

    admitted: requests that waited, in the order in which to admit them. paused: members that left. wake_at: when to
    call `release` again if nothing else happens; None: nothing depends on time.
    """

    admitted: tuple[Hashable, ...]
    paused: tuple[SessionKey, ...]
    wake_at: float | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a request waits.

    reason is one of:

    - "next": it enters with the next call of `release`.
    - "room": it is the next one, but num_missing_tokens tokens of room are missing.
    - "idle": the same, but nothing is busy, so it enters at `until` in any case.
    - "behind": num_ahead sessions are before it.
    - "turn": the turn of its session is over, and ends with the requests that run.
    """

    reason: Reason
    num_missing_tokens: int
    num_ahead: int
    until: float | None
    session: SessionKey
    asked_at: float


@dataclass(frozen=True, slots=True)
class GateStats:
    """The gate's numbers.

    num_left: by rule ("hold", "growth", "turn"), how often members left. num_idle_entries: how many of the num_entries
    entered without room because nothing was busy.
    """

    num_room_tokens: int
    num_member_tokens: int
    num_other_tokens: int
    num_members: int
    num_waiting_sessions: int
    num_waiting_requests: int
    num_entries: int
    num_idle_entries: int
    num_left: dict[str, int]
