"""Writes an answer in the format of OpenAI's Responses, and stores it if asked to."""

import time
import uuid
from typing import Any

from kvblocks.engine.completion import Completion, Piece
from kvblocks.server.answer import Answer
from kvblocks.server.errors import ApiError
from kvblocks.server.misses.record import openais
from kvblocks.server.protocols.response_store import ResponseStore, StoredResponse
from kvblocks.server.protocols.voice import Voice, named_event
from kvblocks.server.tools.calls import ToolCall
from kvblocks.server.wire import encode_json

Json = dict[str, Any]


class ResponsesVoice(Voice):
    """The writer of one answer, which has one choice. store: stores complete answers."""

    def __init__(self, store: ResponseStore, answer: Answer) -> None:
        super().__init__(answer)
        self._store = store
        self._created = int(time.time())
        self._number = 0  # of the next event
        self._output: list[Json] = []  # items that are whole
        self._text: Json | None = None  # the item of text that a stream is in

    def whole(self) -> bytes:
        """Return the complete response."""
        (completion,) = self.answer.completions()
        text, calls = self.answer.read(0, completion.text, is_last=True)
        self._output = [_text_item(text)] if text or not calls else []
        self._output += [_call_item(call) for call in calls]
        return encode_json(self._finished(completion))

    def begin(self, piece: Piece) -> bytes:
        """Return the response's start."""
        del piece
        body = self._body("in_progress", None)
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def say(self, pieces: list[Piece]) -> bytes:
        """Return output items as they become certain."""
        events = []
        for piece in pieces:
            text, calls = self.answer.read(0, piece.text, is_last=piece.completion is not None)
            if text:
                events.append(self._say_text(text))
            events += [self._end_text() + self._say_call(call) for call in calls]
        return b"".join(events)

    def end(self) -> bytes:
        """Return the end of the text, and the complete response."""
        (completion,) = self.answer.completions()
        events = self._end_text()
        if not self._output:  # an answer without text has an empty one
            events += self._say_text("") + self._end_text()
        body = self._finished(completion)
        return events + self._event(f"response.{body['status']}", response=body)

    def fail(self, error: ApiError) -> bytes:
        """Return an error that ends the stream."""
        told = {"code": error.code or "server_error", "message": error.message}
        body = {**self._body("failed", None), "error": told}
        return self._event("error", **told, param=error.param) + self._event("response.failed", response=body)

    def _say_text(self, text: str) -> bytes:
        events = b""
        if self._text is None:
            self._text = _text_item("")
            added = {**self._text, "status": "in_progress", "content": []}
            events += self._event("response.output_item.added", output_index=len(self._output), item=added)
            events += self._part("response.content_part.added", part=self._text["content"][0])
        self._text["content"][0]["text"] += text
        return events + (self._part("response.output_text.delta", delta=text, logprobs=[]) if text else b"")

    def _end_text(self) -> bytes:
        item = self._text
        if item is None:
            return b""
        part = item["content"][0]
        events = self._part("response.output_text.done", text=part["text"], logprobs=[])
        events += self._part("response.content_part.done", part=part)
        events += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._text = None
        return events

    def _say_call(self, call: ToolCall) -> bytes:
        item, index = _call_item(call), len(self._output)
        begun = {**item, "arguments": "", "status": "in_progress"}
        where = {"item_id": item["id"], "output_index": index}
        events = self._event("response.output_item.added", output_index=index, item=begun)
        events += self._event("response.function_call_arguments.delta", **where, delta=call.arguments)
        done = {"name": call.name, "arguments": call.arguments}
        events += self._event("response.function_call_arguments.done", **where, **done)
        events += self._event("response.output_item.done", output_index=index, item=item)
        self._output.append(item)
        return events

    def _part(self, kind: str, **values: Any) -> bytes:
        """An event about the text."""
        assert self._text is not None, "there is a text"
        where = {"item_id": self._text["id"], "output_index": len(self._output), "content_index": 0}
        return self._event(kind, **where, **values)

    def _event(self, kind: str, **values: Any) -> bytes:
        self._number += 1
        return named_event(kind, {"type": kind, "sequence_number": self._number - 1, **values})

    def _finished(self, completion: Completion) -> Json:
        """The whole response, which is kept if the request says so."""
        status = "incomplete" if completion.finish_reason == "length" else "completed"
        body, answer = self._body(status, completion), self.answer
        origin = answer.asked.origin
        if origin is not None and origin.is_stored:
            caller, salt = answer.asked.caller, answer.asked.options.get("salt")
            chat = encode_json([*origin.chat, *self._as_chat()])
            self._store.keep(StoredResponse(caller.tenant, salt, answer.answer_id, encode_json(body), chat))
        return body

    def _as_chat(self) -> list[Json]:
        """The answer as a message of a chat."""
        text = "".join(item["content"][0]["text"] for item in self._output if item["type"] == "message")
        calls = [
            {
                "type": "function",
                "id": item["call_id"],
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            for item in self._output
            if item["type"] == "function_call"
        ]
        return [{"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}]

    def _body(self, status: str, completion: Completion | None) -> Json:
        answer = self.answer
        asked, origin = answer.asked, answer.asked.origin
        is_cut = status == "incomplete"
        found: Json = {
            "id": answer.answer_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": answer.model,
            "output": self._output if completion is not None else [],
            "background": False,
            "truncation": "disabled",
            "reasoning": {"effort": None, "summary": None},
            "usage": None if completion is None else _usage(completion, answer),
            **({} if origin is None else origin.echo),
        }
        diagnostics = openais(answer.compared, asked.compares_with, len(answer.prompts[0]), 1)
        marks = [{"num_tokens": one.num_tokens, "outcome": one.outcome, "reason": one.reason} for one in answer.marked]
        more = {"prompt_cache_diagnostics": diagnostics, "cache_marks": marks, "warnings": list(asked.warnings)}
        return found | {name: value for name, value in more.items() if value}


def _text_item(text: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [part],
    }


def _call_item(call: ToolCall) -> Json:
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
    }


def _usage(completion: Completion, answer: Answer) -> Json:
    num_prompt, num_generated = completion.num_prompt_tokens, len(completion.token_ids)
    by_tier = answer.by_tier([completion])
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {
            "cached_tokens": completion.num_cached_tokens,
            "cache_write_tokens": 0,
            "cached_tokens_by_tier": by_tier,
        },
        "output_tokens": num_generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_generated,
    }
