"""A request on its way to a completion: what the scheduler need not know, such as its sampler and its text so far."""

from collections import deque

from kvblocks.engine.completion import Completion, Piece
from kvblocks.engine.request import Request
from kvblocks.engine.sampler import Sampler
from kvblocks.engine.tokenizer import StreamDecoder


class Generation:
    """A request on its way to a completion.

    prompt_index, sample_index: which answer of the call it is. pieces: those that nobody has taken yet. start_s: when
    it was queued, on the clock of `record`.
    """

    def __init__(
        self, prompt_index: int, sample_index: int, request: Request, sampler: Sampler, decoder: StreamDecoder | None
    ) -> None:
        self.prompt_index = prompt_index
        self.sample_index = sample_index
        self.request = request
        self.sampler = sampler
        self.pieces: deque[Piece] = deque()
        self.start_s = 0.0
        self._decoder = decoder
        self._text = ""
        self._ttft_s: float | None = None

    def record(self, token_id: int, now_s: float) -> None:
        """Turn a sampled token into a piece; if it was the last one, with the completion."""
        if self._ttft_s is None:
            self._ttft_s = now_s - self.start_s
        text = "" if self._decoder is None else self._decoder.feed([token_id])
        reason = self.request.finish_reason
        if reason is None:
            self._text += text
            self.pieces.append(self._piece(token_id, text))
            return
        if self._decoder is not None:
            text += self._decoder.finish()
        completion = Completion(
            text=self._text + text,
            token_ids=self.request.output_token_ids,
            num_prompt_tokens=self.request.sequence.num_prompt_tokens,
            num_cached_tokens=self.request.num_cached_tokens,
            num_computed_tokens=self.request.num_computed_tokens,
            ttft_s=self._ttft_s,
            finish_reason=reason,
        )
        self.pieces.append(self._piece(token_id, text, completion))

    def _piece(self, token_id: int, text: str, completion: Completion | None = None) -> Piece:
        return Piece(self.prompt_index, token_id, text, completion, self.sample_index)
