"""The engine's results: a stream of pieces, and a completion at the end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvblocks.engine.sampling.drawn import TokenLogprobs
from kvblocks.engine.schedule.request import FinishReason


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer to a prompt (one of its `n` samples), and what it cost.

    - text: without special tokens; "" if the model has no tokenizer.
    - token_ids: all generated tokens, the stop token included.
    - num_cached_tokens: tokens of the prompt that weren't computed for this answer, because the cache had them or
      another sample of the prompt computed them.
    - num_loaded_tokens: of these, those that were loaded from below the device, by tier ("host", "disk").
    - num_computed_tokens: tokens that went through the model, of prompt and answer, recomputed ones included. The last
      generated token is never computed.
    - ttft_s: seconds from the call to the first token, waiting included; or until the prompt was computed, if no token
      was asked for.
    - finish_reason: "stop" or "length".
    - logprobs: one for each of token_ids, if the request asked for them, else None.
    - prompt_logprobs: one for each token of the prompt, if the request asked for them, else None. The first is None,
      since nothing comes before that token.
    """

    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    ttft_s: float
    finish_reason: FinishReason
    num_loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Piece(NamedTuple):
    """One generated token.

    - prompt_index, sample_index: which prompt and which sample it belongs to, both counted from 0.
    - text: the text that this token adds and that later tokens can't change any more; may be "".
    - completion: the whole answer, with the last token; None before.
    - logprobs: the token's, if they were asked for, else None.
    - prompt_logprobs: the prompt's, with the first token, if they were asked for.
    - num_cached_tokens: as in `Completion`, with the first token; None after.
    """

    prompt_index: int
    token_id: int
    text: str
    completion: Completion | None = None
    sample_index: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int | None = None
