"""A request as the scheduler sees it: a sequence, when it is finished, and what it has cost so far.

A sampled token joins the sequence at once, without a slot; the next step makes room for it like for any other token
that isn't computed yet. So a request that loses its blocks loses no token, and prefill, decode and recompute are the
same case. The scheduler alone changes a request.
"""

from dataclasses import dataclass
from typing import Literal

from kvblocks.arguments import check_count
from kvblocks.sequence import Sequence

FinishReason = Literal["stop", "length"]


@dataclass(eq=False, slots=True)
class Request:
    """One sequence to continue by at most `max_tokens` tokens; one of `stop_token_ids` ends it earlier.

    num_cached_tokens: those that needed no computing when it was first admitted. num_computed_tokens: tokens that went
    through the model for it, recomputed ones included. num_preemptions: how often it lost its blocks to an older one.
    finish_reason: None while it is unfinished. Raises InvalidArgumentError.
    """

    sequence: Sequence
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        check_count("max_tokens", self.max_tokens, 1)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far. O(1)."""
        return self.sequence.num_tokens - self.sequence.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far, a stop token included. O(tokens generated)."""
        return self.sequence.token_ids(self.sequence.num_prompt_tokens)
