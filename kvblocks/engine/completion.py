"""The engine's results: a stream of pieces, and a completion at the end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvblocks.engine.sampling.drawn import TokenLogprobs
from kvblocks.engine.schedule.request import FinishReason


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt, or one of several, and what it cost.

    - text: without special tokens; "" if the model has no tokenizer.
    - token_ids: all generated tokens, the stop token included.
    - num_cached_tokens: tokens of the prompt that weren't computed for it: the cache had them, or another sample
      computed them for all.
    - num_loaded_tokens: of these, those that were loaded from below the device, by tier ("host", "disk").
    - num_computed_tokens: tokens that went through the model, of the prompt and generated, recomputed ones included.
      The last generated token never does.
    - ttft_s: seconds from the call to the first token, with waiting. If no token was asked for: until the prompt was
      computed.
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

    - prompt_index, sample_index: its prompt and sample; samples of a prompt count from 0.
    - text: the text that can no longer change once this token is known, beyond that of earlier pieces; may be "".
    - completion: with the last token.
    - logprobs: if they were asked for.
    - prompt_logprobs: with the first token, if they were asked for.
    - num_cached_tokens: with the first token: of the prompt, as in `Completion`.
    """

    prompt_index: int
    token_id: int
    text: str
    completion: Completion | None = None
    sample_index: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int | None = None
