"""One step: its limits, and what it computes of each request."""

from dataclasses import dataclass
from typing import NamedTuple

from kvblocks import KVCacheManager
from kvblocks.arguments import check_count, is_number
from kvblocks.engine.schedule.open_chunk import OpenChunk
from kvblocks.engine.schedule.request import Request
from kvblocks.errors import InvalidArgumentError

GPU_BATCHED_TOKENS, GPU_SEQS = 8192, 256
"""The default limits of a step on a GPU. Smaller steps hardly take less time there."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most that one step computes: tokens of all sequences together, and sequences. Raises InvalidArgumentError.

    Every running sequence needs room for one token, so the limit of tokens must be at least that of sequences.
    max_num_chunk_tokens: the most tokens of one sequence, so that a step with a part of a long prompt ends soon; None:
    no such limit. A prompt is long if it takes more than one step for this reason. If the runner can compute a chunk by
    layers, a long prompt's chunks have up to max_num_batched_tokens tokens, and a step computes a few layers of one,
    which take no longer than max_num_chunk_tokens tokens through all layers (`LongPrompts`). max_num_partial_prefills:
    how many long prompts run at once, in turns. Other long prompts wait, and shorter ones pass them. If there are
    several such places, the prompts of one salt get all but one of them. wait_for_prefixes: whether a request waits
    while a running one computes, in chunks, a prefix that both begin with; otherwise both compute it. watermark: the
    share of the pool, at least 0.0 and below 1.0, that stays free when a request is admitted, so that running requests
    can grow and aren't preempted at once. It is rounded down to whole blocks, and has no effect while nothing runs.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_num_chunk_tokens: int | None = None
    wait_for_prefixes: bool = True
    watermark: float = 0.01
    max_num_partial_prefills: int = 3

    def __post_init__(self) -> None:
        check_count("max_num_seqs", self.max_num_seqs, 1)
        check_count("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs)
        if self.max_num_chunk_tokens is not None:
            check_count("max_num_chunk_tokens", self.max_num_chunk_tokens, 1)
        check_count("max_num_partial_prefills", self.max_num_partial_prefills, 1)
        if not isinstance(self.wait_for_prefixes, bool):
            raise InvalidArgumentError(f"wait_for_prefixes: expected True or False, got {self.wait_for_prefixes!r}")
        if not is_number(self.watermark) or not 0 <= self.watermark < 1:
            raise InvalidArgumentError(f"watermark: expected a share from 0.0 to below 1.0, got {self.watermark!r}")

    @classmethod
    def default_on(cls, device_type: str) -> "StepLimits":
        """The default limits of an engine on "cpu" or "cuda". O(1)."""
        return cls(GPU_BATCHED_TOKENS, GPU_SEQS) if device_type == "cuda" else cls()

    def chunk_tokens(self, num_left: int) -> int:
        """How many tokens of one sequence may be computed in a step with room for `num_left` more. O(1)."""
        return num_left if self.max_num_chunk_tokens is None else min(num_left, self.max_num_chunk_tokens)

    @property
    def num_step_tokens(self) -> int:
        """The most tokens that a step computes of one request. O(1)."""
        return self.chunk_tokens(self.max_num_batched_tokens)


class ScheduledChunk(NamedTuple):
    """The next `num_tokens` tokens of a request, from position `start`.

    samples: whether the logits of the last token are wanted. copies: (source, destination) ids of blocks to copy in all
    layers, in order. Make the copies of earlier chunks first, and all copies before the step stores anything. part: the
    open chunk, if the step computes only a slice of it, the layers `part.layers` of these tokens. Such a step has no
    other chunk, and samples nothing. source: for a chunk that was scheduled before its token was known, the index of
    that token among those that the previous step samples. None: its tokens are known.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    copies: tuple[tuple[int, int], ...] = ()
    part: OpenChunk | None = None
    source: int | None = None

    @classmethod
    def slice_of(cls, part: OpenChunk) -> "ScheduledChunk":
        """The next slice of an open chunk. O(1)."""
        copies = () if part.num_done_layers else part.copies
        return cls(part.request, part.start, part.num_tokens, samples=False, copies=copies, part=part)

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute; -1 - source for one that isn't known yet. O(num_tokens)."""
        if self.source is not None:
            return [-1 - self.source]
        return self.request.sequence.token_ids(self.start, self.start + self.num_tokens)

    @property
    def is_all(self) -> bool:
        """Whether this is the last chunk of a request that generates nothing. O(1)."""
        return not self.request.max_tokens and self.start + self.num_tokens == self.request.sequence.num_tokens

    @property
    def sampled_requests(self) -> list[Request]:
        """The requests that get a token from this chunk's logits: none, its own, or all samples of its prompt.

        O(samples).
        """
        request = self.request
        if not self.samples:
            return []
        return [request, *request.siblings] if request.siblings else [request]


def chunk_of(manager: KVCacheManager, request: Request, start: int) -> ScheduledChunk:
    """Return a request's chunk from `start` to its last allocated slot. Takes the pending copies. O(copies)."""
    end = request.sequence.num_computed_tokens
    copies = tuple([(source, destination) for _, source, destination in manager.take_copies()])
    samples = end == request.sequence.num_tokens and request.max_tokens > 0
    return ScheduledChunk(request, start, end - start, samples, copies)
