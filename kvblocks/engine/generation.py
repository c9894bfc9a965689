"""A request in progress, with what the scheduler doesn't need to know, such as its sampler and its text."""

from collections import deque
from collections.abc import Iterator

from kvblocks.engine.completion import Completion, Piece
from kvblocks.engine.sampling.drawn import Drawn, TokenLogprobs
from kvblocks.engine.sampling.prompt_scores import PromptScores
from kvblocks.engine.sampling.sampler import Draw, Sampler
from kvblocks.engine.schedule.request import FinishReason, Request
from kvblocks.engine.text.stop_strings import StopMatcher
from kvblocks.engine.text.tokenizer import StreamDecoder


class Generation:
    """A request in progress. Callers read it and take its pieces; only the engine writes to it.

    prompt_index, sample_index: which prompt of the call it answers, and which sample it is. scores: the scores of the
    prompt's tokens, shared with the other samples; None if none were asked for. pieces: those that haven't been taken
    yet. text: the text of all pieces so far. completion: set once it has all its tokens. error: the exception, if its
    finish_reason is "error". is_submitted: if True, a failure of a step ends this generation; if False, the failure is
    raised to the caller of `step`. start_s: when it was queued, on the clock that `record` is given. num_told: how many
    tokens have become pieces.
    """

    def __init__(
        self,
        prompt_index: int,
        sample_index: int,
        request: Request,
        sampler: Sampler,
        decoder: StreamDecoder | None,
        stops: StopMatcher,
    ) -> None:
        self.prompt_index = prompt_index
        self.sample_index = sample_index
        self.request = request
        self.sampler = sampler
        self.scores: PromptScores | None = None
        self.pieces: deque[Piece] = deque()
        self.text = ""
        self.completion: Completion | None = None
        self.error: Exception | None = None
        self.is_submitted = False
        self.start_s = 0.0
        self.num_told = 0
        self._last: tuple[int, Piece] | None = None  # the last piece and its number; it may not be out yet
        self._is_whole = True  # no call of `record` was left half done
        self._decoder = decoder
        self._stops = stops
        self._ttft_s = 0.0
        self._logprobs: list[TokenLogprobs] | None = None if sampler.params.logprobs is None else []

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended: "stop", "length", "cancelled", "timeout" or "error"; None until it ends. O(1)."""
        if self.error is not None:
            return "error"
        return self.request.finish_reason if self.completion is None else self.completion.finish_reason

    def take_pieces(self) -> Iterator[Piece]:
        """Take the pieces that have come, for a stream. Then raises `error`, which a text has that can't be decoded."""
        while self.pieces:
            yield self.pieces.popleft()
        if self.error is not None:
            raise self.error

    def next_draw(self, position: int) -> Draw | Exception:
        """How to draw the answer's token at `position`, the next one, or the exception if that fails. O(new tokens)."""
        try:
            return self.sampler.next_draw(self.request.sequence, position)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is this sampler's
            return error

    def record(self, drawn: Drawn, now_s: float) -> None:
        """Turn a drawn token into a piece. The last piece has the completion. O(1) a character.

        A stop string completes the generation, too. Its request is then still unfinished, and the caller ends it. After
        an interrupted call, call `recover` first.
        """
        self._is_whole = False
        token_id, own = drawn
        of_prompt, num_cached = None, None
        if not self.num_told:
            num_cached = self.request.num_cached_tokens
            self._ttft_s = now_s - self.start_s
            of_prompt = self._prompt_logprobs
        text = "" if self._decoder is None else self._certain_text(token_id, self._decoder)
        self.text += text
        if self._logprobs is not None and own is not None:
            self._logprobs.append(own)
        reason: FinishReason | None = "stop" if self._stops.is_matched else self.request.finish_reason
        completion = None if reason is None else self._complete(reason, self._ttft_s)
        piece = Piece(self.prompt_index, token_id, text, completion, self.sample_index, own, of_prompt, num_cached)
        self._last = self.num_told + 1, piece
        self.pieces.append(piece)
        self.num_told, self.completion = self.num_told + 1, completion
        self._is_whole = True

    def recover(self) -> None:
        """Undo what an interrupted call of `record` did, or end the call if its piece is out already. O(tokens).

        Does nothing if no call was interrupted. May be interrupted itself, and called again.
        """
        if self._is_whole:
            return
        if self._last is not None and self.pieces and self.pieces[-1] is self._last[1]:
            self.num_told, self.completion = self._last[0], self._last[1].completion
        if self.completion is None:
            self._decode_again(self.request.output_token_ids[: self.num_told])
        self._is_whole = True

    def _decode_again(self, token_ids: list[int]) -> None:
        """Decode the tokens that have become pieces, from the first one on, as if nothing had come after them."""
        self._stops.reset()
        self.text = ""
        if self._decoder is not None:
            self._decoder.reset()
            for token_id in token_ids:
                self.text += self._stops.feed(self._decoder.feed([token_id]))
        if self._logprobs is not None:
            del self._logprobs[len(token_ids) :]

    def end(self, now_s: float) -> None:
        """Complete a request that generates nothing. It gets no piece. O(1)."""
        self.completion = self._complete("length", now_s - self.start_s)

    def _complete(self, reason: FinishReason, ttft_s: float) -> Completion:
        return Completion(
            text=self.text,
            token_ids=self.request.output_token_ids,
            num_prompt_tokens=self.request.sequence.num_prompt_tokens,
            num_cached_tokens=self.request.num_cached_tokens,
            num_computed_tokens=self.request.num_computed_tokens,
            ttft_s=ttft_s,
            finish_reason=reason,
            num_loaded_tokens=dict(self.request.num_loaded_tokens),
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )

    @property
    def _prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        return None if self.scores is None else self.scores.logprobs

    def _certain_text(self, token_id: int, decoder: StreamDecoder) -> str:
        """The text that the token makes certain; for the last token, all that is left. A stop token has no text."""
        text = "" if self.request.finish_reason == "stop" else decoder.feed([token_id])
        if self.request.finish_reason is None:
            return self._stops.feed(text)
        return self._stops.feed(text + decoder.finish()) + self._stops.finish()
