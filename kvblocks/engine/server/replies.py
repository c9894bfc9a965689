"""How an answer looks on the wire: one JSON body, or the chunks of a stream. Plain values in, plain values out."""

import json
from dataclasses import dataclass, field
from typing import Any

from kvblocks.engine.completion import Completion
from kvblocks.engine.server.requests import AnswerRequest

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Delta:
    """What was generated of one choice since the last delta. completion: with the last one of the choice.

    is_first_sample: of its prompt; that one's completion counts what the prompt cost.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None
    is_first_sample: bool = True


@dataclass
class _Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Reply:
    """An answer that is put together from deltas; make one for each request. created: in seconds since 1970."""

    def __init__(self, request: AnswerRequest, answer_id: str, model: str, created: int) -> None:
        self.answer_id = answer_id
        self._request = request
        self._is_chat = request.kind == "chat"
        self._head: Json = {"id": answer_id, "object": "", "created": created, "model": model}
        self._choices = [_Choice() for _ in range(request.num_choices)]
        self._begun: set[int] = set()
        self._num_prompt_tokens = self._num_cached_tokens = self._num_completion_tokens = 0

    @property
    def is_whole(self) -> bool:
        """Whether all choices are finished."""
        return all(choice.finish_reason is not None for choice in self._choices)

    def add(self, delta: Delta) -> None:
        """Take a delta in."""
        choice = self._choices[delta.choice]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        if delta.completion is None:
            return
        choice.finish_reason = delta.completion.finish_reason
        self._num_completion_tokens += len(delta.completion.token_ids)
        if delta.is_first_sample:
            self._num_prompt_tokens += delta.completion.num_prompt_tokens
            self._num_cached_tokens += delta.completion.num_cached_tokens

    @property
    def usage(self) -> Json:
        """The tokens of all finished choices; a prompt counts once, however many samples it has."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }

    def body(self) -> Json:
        """Return the whole answer."""
        kind = "chat.completion" if self._is_chat else "text_completion"
        choices = []
        for index, choice in enumerate(self._choices):
            text: Json = (
                {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
                if self._is_chat
                else {"text": choice.text}
            )
            rest = {"logprobs": None, "finish_reason": choice.finish_reason}
            choices.append({"index": index, **text, **rest, **self._token_ids(choice.token_ids)})
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage}

    def chunks(self, delta: Delta) -> list[Json]:
        """Take a delta in and return what a stream says of it: nothing, if it is a part of a character only."""
        self.add(delta)
        is_begun = delta.choice in self._begun
        self._begun.add(delta.choice)
        reason = None if delta.completion is None else delta.completion.finish_reason
        chunks = []
        if self._is_chat and not is_begun:
            chunks.append(self._chunk(delta, {"delta": {"role": "assistant", "content": ""}}, None, ()))
        has_tokens = self._request.return_token_ids and bool(delta.token_ids)
        if delta.text or reason is not None or has_tokens:
            content = {"content": delta.text} if delta.text or reason is None else {}
            text: Json = {"delta": content} if self._is_chat else {"text": delta.text}
            chunks.append(self._chunk(delta, text, reason, delta.token_ids))
        return chunks

    def usage_chunk(self) -> Json:
        """Return the chunk that a client asked for by `include_usage`; it comes last."""
        return {**self._chunk_head(), "choices": [], "usage": self.usage}

    def _chunk(self, delta: Delta, text: Json, reason: str | None, token_ids: tuple[int, ...]) -> Json:
        tokens = self._token_ids(list(token_ids))
        choice = {"index": delta.choice, **text, "logprobs": None, "finish_reason": reason, **tokens}
        usage: Json = {"usage": None} if self._request.include_usage else {}
        return {**self._chunk_head(), "choices": [choice], **usage}

    def _chunk_head(self) -> Json:
        return {**self._head, "object": "chat.completion.chunk" if self._is_chat else "text_completion"}

    def _token_ids(self, token_ids: list[int]) -> Json:
        return {"token_ids": token_ids} if self._request.return_token_ids else {}


def encode_json(value: Any) -> bytes:
    """Return a value as JSON. ASCII only: what clients sent, lone surrogates too, may come back in messages."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def encode_event(value: Any) -> bytes:
    """Return a value as one server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
