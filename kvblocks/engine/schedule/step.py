"""One step: how much it computes at most, and what it computes of each request."""

from dataclasses import dataclass

from kvblocks.arguments import check_count, is_number
from kvblocks.engine.schedule.request import Request
from kvblocks.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How much one step computes at most: tokens of all sequences together, and sequences. Raises InvalidArgumentError.

    Every running sequence needs room for one token, so the limit of tokens is at least that of sequences.
    max_num_chunk_tokens: of one sequence, so that a long prompt leaves room for others in its steps; None: no such
    limit. wait_for_prefixes: whether a request waits while a running one computes, in chunks, a prefix that both begin
    with; otherwise both compute it. watermark: the share of the pool, from 0.0 to below 1.0, that is left free when a
    request is admitted. Running requests then have room to grow, and aren't preempted at once. It is rounded down to
    whole blocks, and has no effect while nothing runs.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_num_chunk_tokens: int | None = None
    wait_for_prefixes: bool = True
    watermark: float = 0.01

    def __post_init__(self) -> None:
        check_count("max_num_seqs", self.max_num_seqs, 1)
        check_count("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs)
        if self.max_num_chunk_tokens is not None:
            check_count("max_num_chunk_tokens", self.max_num_chunk_tokens, 1)
        if not isinstance(self.wait_for_prefixes, bool):
            raise InvalidArgumentError(f"wait_for_prefixes: expected True or False, got {self.wait_for_prefixes!r}")
        if not is_number(self.watermark) or not 0 <= self.watermark < 1:
            raise InvalidArgumentError(f"watermark: expected a share from 0.0 to below 1.0, got {self.watermark!r}")

    def chunk_tokens(self, num_left: int) -> int:
        """How many tokens one sequence may compute in a step that has `num_left` left. O(1)."""
        return num_left if self.max_num_chunk_tokens is None else min(num_left, self.max_num_chunk_tokens)


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next `num_tokens` tokens of a request, from position `start`. samples: whether the last one's logits are
    wanted.

    copies: (source, destination) ids of blocks to copy in all layers, one pair after the other. Make the copies of
    earlier chunks first, and all copies before the step stores anything.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute. O(num_tokens)."""
        return self.request.sequence.token_ids(self.start, self.start + self.num_tokens)

    @property
    def is_all(self) -> bool:
        """Whether it is the last chunk of a request that generates nothing. O(1)."""
        return not self.request.max_tokens and self.start + self.num_tokens == self.request.sequence.num_tokens

    @property
    def sampled_requests(self) -> list[Request]:
        """The requests that get a token from its logits: none, its own, or all samples of its prompt. O(samples)."""
        return [self.request, *self.request.siblings] if self.samples else []
