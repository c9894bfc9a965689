"""A trace in memory: requests, and the blocks of their prompts, in a few flat arrays.

A block is a number from 0 on. Equal numbers mean equal prefixes: a block's number stands for its tokens and all tokens
before them. So a prompt is a path in a tree, and a block manager only needs this number instead of a block's tokens.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

import numpy as np

from kvblocks.errors import InvalidArgumentError, KVBlocksError
from kvblocks.replay.result import TraceFacts

Numbers = np.ndarray[Any, np.dtype[Any]]


class TraceError(KVBlocksError, ValueError):
    """A trace can't be read. The message names the file, line and field, and what was expected and got."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order of their file. A session's requests are in the order of their times.

    - blocks: all prompts' blocks, one prompt after another, uint32.
    - ends: int64; request i has blocks[ends[i]:ends[i + 1]], so ends[0] is 0.
    - sessions: for each request, the number of its session.
    - times: for each request, when it came, in seconds from the trace's beginning, or from the session's if
      `times_are_relative`.
    - durations: for each request, the seconds that it ran; NaN if unknown.
    - thinks: for each request, the seconds since the session's previous request ended; NaN if unknown.
    - tokens, outputs: for each request, the numbers of tokens of prompt and answer.
    - stops: for each request, why it ended.
    - session_names: for each session; None for a request without a session, which counts as one.
    - tenants: for each session; None for no tenant. All sessions with None count as one tenant's.
    """

    name: str
    source_format: str
    block_size: int
    blocks: Numbers
    ends: Numbers
    sessions: Numbers
    times: Numbers
    durations: Numbers
    thinks: Numbers
    tokens: Numbers
    outputs: Numbers
    stops: list[str]
    session_names: list[str | None]
    tenants: list[str | None]
    times_are_relative: bool

    @property
    def num_requests(self) -> int:
        """The number of requests. O(1)."""
        return len(self.sessions)

    @property
    def num_unique_blocks(self) -> int:
        """The number of different blocks. O(1)."""
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    def blocks_of(self, request: int) -> Numbers:
        """Return the blocks of a request's prompt, as a view. O(1)."""
        return self.blocks[self.ends[request] : self.ends[request + 1]]

    def with_durations(self, seconds_per_token: float) -> "Trace":
        """Return the trace with missing durations filled in: `seconds_per_token` for each token of the answer."""
        missing = np.isnan(self.durations)
        return replace(self, durations=np.where(missing, self.outputs * seconds_per_token, self.durations))

    def take_sessions(self, first: int, last: int) -> "Trace":
        """Return the sessions `first` to `last` - 1, in the order of their first requests. O(references)."""
        if not 0 <= first < last <= len(self.session_names):
            raise InvalidArgumentError(
                f"sessions: expected FROM:TO with 0 <= FROM < TO <= {len(self.session_names)}, got {first}:{last}"
            )
        kept = np.flatnonzero((self.sessions >= first) & (self.sessions < last))
        lengths = np.diff(self.ends)
        taken = np.repeat((self.sessions >= first) & (self.sessions < last), lengths)
        return replace(
            self,
            blocks=number_densely(self.blocks[taken]),
            ends=ends_of(lengths[kept]),
            sessions=self.sessions[kept] - first,
            times=self.times[kept],
            durations=self.durations[kept],
            thinks=self.thinks[kept],
            tokens=self.tokens[kept],
            outputs=self.outputs[kept],
            stops=[self.stops[request] for request in kept],
            session_names=self.session_names[first:last],
            tenants=self.tenants[first:last],
        )

    def facts(self, arrivals: Numbers) -> TraceFacts:
        """Return facts about the trace. arrivals: the result of `arrival_times`. O(1)."""
        num_references, num_unique = len(self.blocks), self.num_unique_blocks
        num_tokens = int(self.tokens.sum())
        return TraceFacts(
            name=self.name,
            source_format=self.source_format,
            num_requests=self.num_requests,
            num_sessions=len(self.session_names),
            num_references=num_references,
            num_unique_blocks=num_unique,
            block_size=self.block_size,
            duration_s=float(arrivals.max() - arrivals.min()) if len(arrivals) else 0.0,
            infinite_hit_rate=(num_references - num_unique) / num_references if num_references else 0.0,
            num_other_tokens=max(0, num_tokens - num_references * self.block_size),
        )


def ends_of(lengths: Numbers) -> Numbers:
    """Return the cumulative sums of lengths, beginning with 0."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def number_densely(blocks: Numbers) -> Numbers:
    """Return the blocks renumbered from 0 on without gaps, in the order of their numbers, as uint32.

    O(references + largest number), or O(references x log(references)) if that number is much larger.
    """
    if not len(blocks):
        return blocks.astype(np.uint32)
    if blocks.max() > 16 * len(blocks) + 2**20:
        return np.unique(blocks, return_inverse=True)[1].astype(np.uint32)
    is_used = np.zeros(int(blocks.max()) + 1, bool)
    is_used[blocks] = True
    return (np.cumsum(is_used) - 1).astype(np.uint32)[blocks]


def arrival_times(trace: Trace, mean_s: float | None, seed: int) -> Numbers:
    """Return when each request comes, in seconds. In a closed loop this is only true of sessions' first requests.

    mean_s: the mean time between the beginnings of two sessions. Sessions begin in their order; the times between are
    drawn by `random.Random(seed).expovariate(1 / mean_s)`. Times inside a session stay. None: as recorded, where all
    sessions begin at 0 if the trace only has times inside sessions.
    """
    if mean_s is None:
        return trace.times.copy()
    random = Random(seed)
    starts = np.fromiter(
        accumulate(random.expovariate(1 / mean_s) for _ in trace.session_names), np.float64, len(trace.session_names)
    )
    first = np.full(len(trace.session_names), np.inf)
    np.minimum.at(first, trace.sessions, trace.times)
    times: Numbers = starts[trace.sessions] + (trace.times - first[trace.sessions])
    return times


def think_times(trace: Trace) -> Numbers:
    """Return, for each request, the seconds since its session's previous request ended; 0 for the first one.

    If the trace doesn't have them, they are computed from times and durations. Never less than 0.
    """
    thinks = trace.thinks.copy()
    last: dict[int, int] = {}
    for request in range(trace.num_requests):
        session = int(trace.sessions[request])
        before = last.get(session)
        last[session] = request
        if before is None:
            thinks[request] = 0.0
        elif np.isnan(thinks[request]):
            thinks[request] = trace.times[request] - trace.times[before] - trace.durations[before]
    return np.maximum(thinks, 0.0)
