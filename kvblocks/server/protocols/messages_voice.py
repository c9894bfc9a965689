"""Writes an answer in the format of Anthropic's Messages."""

import json
from typing import Any

from kvblocks.engine.completion import Completion, Piece
from kvblocks.server.answer import Answer
from kvblocks.server.errors import ApiError
from kvblocks.server.misses.record import anthropics
from kvblocks.server.protocols.voice import Voice, named_event
from kvblocks.server.tools.calls import ToolCall
from kvblocks.server.wire import encode_json

Json = dict[str, Any]


class MessagesVoice(Voice):
    """The writer of one answer, which has one choice."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._num_blocks = 0
        self._is_in_text = False

    def whole(self) -> bytes:
        """Return the complete message."""
        (completion,) = self.answer.completions()
        text, calls = self.answer.read(0, completion.text, is_last=True)
        content: list[Json] = [{"type": "text", "text": text}] if text or not calls else []
        content += [_call_block(call, json.loads(call.arguments)) for call in calls]
        return encode_json({**self._head(), "content": content, **self._ending(completion), **self._told()})

    def begin(self, piece: Piece) -> bytes:
        """Return the message's start, with the number of the prompt's tokens."""
        usage = {**self._prompt_usage(piece.num_cached_tokens or 0), "output_tokens": 0}
        empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return self._event("message_start", message={**self._head(), **empty, **self._told()}) + self._event("ping")

    def say(self, pieces: list[Piece]) -> bytes:
        """Return content blocks as they become certain."""
        events = []
        for piece in pieces:
            text, calls = self.answer.read(0, piece.text, is_last=piece.completion is not None)
            if text:
                if not self._is_in_text:
                    events.append(self._start({"type": "text", "text": ""}))
                    self._is_in_text = True
                delta = {"type": "text_delta", "text": text}
                events.append(self._event("content_block_delta", index=self._num_blocks, delta=delta))
            for call in calls:
                events.append(self._stop_text() + self._start(_call_block(call, {})))
                delta = {"type": "input_json_delta", "partial_json": call.arguments}
                events.append(self._event("content_block_delta", index=self._num_blocks, delta=delta))
                events.append(self._stop())
        return b"".join(events)

    def end(self) -> bytes:
        """Return the stop reason, the complete usage, and the end."""
        (completion,) = self.answer.completions()
        events = self._stop_text()
        if not self._num_blocks:  # an answer without text has an empty one
            events += self._start({"type": "text", "text": ""}) + self._stop()
        ending = self._ending(completion)
        usage = ending.pop("usage")
        return events + self._event("message_delta", delta=ending, usage=usage) + self._event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        """Return an error that ends the stream."""
        return named_event("error", error.to_anthropics())

    def _start(self, block: Json) -> bytes:
        return self._event("content_block_start", index=self._num_blocks, content_block=block)

    def _stop(self) -> bytes:
        self._num_blocks += 1
        return self._event("content_block_stop", index=self._num_blocks - 1)

    def _stop_text(self) -> bytes:
        if not self._is_in_text:
            return b""
        self._is_in_text = False
        return self._stop()

    def _event(self, kind: str, **values: Any) -> bytes:
        return named_event(kind, {"type": kind, **values})

    def _head(self) -> Json:
        answer = self.answer
        return {"id": answer.answer_id, "type": "message", "role": "assistant", "model": answer.model}

    def _told(self) -> Json:
        """What was asked about the cache: the comparison, and what became of marks."""
        answer = self.answer
        found = anthropics(answer.compared, answer.asked.compares_with, len(answer.prompts[0]))
        told: Json = {} if found is None else {"diagnostics": found}
        marks = [
            {"num_tokens": one.num_tokens, "ttl_s": one.ttl_s, "outcome": one.outcome, "reason": one.reason}
            for one in answer.marked
        ]
        told |= {"cache_marks": marks} if marks else {}
        return {**told, "warnings": list(answer.asked.warnings)} if answer.asked.warnings else told

    def _ending(self, completion: Completion) -> Json:
        answer = self.answer
        stop = answer.stop_string(completion)
        reason = answer.reason(0, completion)
        most = answer.asked.options["max_tokens"]
        if reason == "length" and most is not None and len(completion.token_ids) < most:
            reason = "model_context_window_exceeded"
        names = {"length": "max_tokens", "tool_calls": "tool_use"}
        names["stop"] = "end_turn" if stop is None else "stop_sequence"
        said = names.get(reason, reason)
        usage = {**self._prompt_usage(completion.num_cached_tokens), "output_tokens": len(completion.token_ids)}
        return {"stop_reason": said, "stop_sequence": stop if said == "stop_sequence" else None, "usage": usage}

    def _prompt_usage(self, num_cached: int) -> Json:
        """The tokens of the prompt: read from the cache, newly written up to the last mark that holds, and others."""
        answer, num_prompt = self.answer, len(self.answer.prompts[0])
        written = {300.0: 0, 3600.0: 0}
        reached = num_cached
        for mark in sorted(answer.marked, key=lambda one: one.num_tokens):
            if mark.outcome != "refused":
                written[mark.ttl_s] += max(0, mark.num_tokens - reached)
                reached = max(reached, mark.num_tokens)
        return {
            "input_tokens": num_prompt - reached,
            "cache_creation_input_tokens": reached - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation": {
                "ephemeral_5m_input_tokens": written[300.0],
                "ephemeral_1h_input_tokens": written[3600.0],
            },
        }


def _call_block(call: ToolCall, arguments: Json) -> Json:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments}
