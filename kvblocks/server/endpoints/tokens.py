"""Texts to tokens and back: /tokenize and /detokenize, in vLLM's formats."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.server.access.callers import AnswerSlots
from kvblocks.server.access.gate import caller_of
from kvblocks.server.body.fields import Fields
from kvblocks.server.body.messages import (
    Message,
    num_chars,
    num_message_chars,
    parse_messages,
    parse_template_values,
)
from kvblocks.server.endpoints.about import check_model
from kvblocks.server.errors import ApiError, late_error
from kvblocks.server.requests import parse_prompts
from kvblocks.server.service import Service
from kvblocks.server.tools.choice import ToolUse, parse_tools
from kvblocks.server.tools.formats import ToolFormat
from kvblocks.server.tools.teaching import encode_chat
from kvblocks.server.wire import json_response

Encode = Callable[[Tokenizer | None], list[list[int]]]


class TokensApi:
    """These endpoints for one service.

    A text counts as a request while it is encoded, and may be as long as a prompt.
    """

    def __init__(self, service: Service, names: Sequence[str]) -> None:
        self._service = service
        self._names = names

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a `prompt`, or of `messages` in the model's template."""
        (encode, length, returns_strings), load = await self._service.bodies.take(request, self._parse_text)
        slots = AnswerSlots(caller_of(request.scope), 1)
        try:
            async with asyncio.timeout(self._service.settings.request_timeout_s):
                (tokens,) = await self._service.encode(encode, (length,), slots, load)
        except TimeoutError:
            raise late_error(self._service.settings.request_timeout_s) from None
        self._service.close(slots)
        model = self._service.engine.model
        strings = None
        if returns_strings and model.tokenizer is not None:
            strings = [model.tokenizer.id_to_token(token) for token in tokens]
        answer = {"count": len(tokens), "max_model_len": model.config.max_position_embeddings, "tokens": tokens}
        return json_response({**answer, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        """The text of `tokens`, special ones included."""
        model = self._service.engine.model
        tokens, most = (
            await self._service.bodies.read(request, self._parse_tokens),
            model.config.max_position_embeddings,
        )
        if len(tokens) > most:
            raise ApiError(
                400, f"tokens: expected at most {most}, the model's context, got {len(tokens)}", param="tokens"
            )
        if tokens and max(tokens) >= model.config.vocab_size:
            below = f"token ids below {model.config.vocab_size}, the vocabulary's size"
            raise ApiError(400, f"tokens: expected {below}, got {max(tokens)}", param="tokens")
        if model.tokenizer is None:
            raise ApiError(400, "expected a model with a tokenizer, got one without", param="tokens")
        text = await asyncio.to_thread(model.tokenizer.decode, tokens, skip_special_tokens=False)
        return json_response({"prompt": text})

    def _parse_text(self, body: Any) -> tuple[Encode, int, bool]:
        """Read a body of `tokenize`: a function that encodes its text, that text's length, whether it wants strings."""
        fields = Fields(body)
        check_model(self._names, fields.text("model"))
        returns_strings = fields.flag("return_token_strs")
        encode, length = (
            _parse_chat(fields, self._service.tool_format) if "messages" in fields else _parse_prompt(fields)
        )
        fields.refuse_unknown()
        return encode, length, returns_strings

    def _parse_tokens(self, body: Any) -> list[int]:
        """Read a body of `detokenize`."""
        fields = Fields(body)
        check_model(self._names, fields.text("model"))
        value = fields.take("tokens")
        fields.refuse_unknown()
        prompts = parse_prompts(value) if isinstance(value, list) and value else ([],)
        if not isinstance(value, list) or len(prompts) != 1 or isinstance(prompts[0], str):
            raise fields.error("tokens", "a list of token ids")
        return prompts[0]

    async def tokenizer_info(self, request: Request) -> Response:
        """The texts of the tokens that begin and end prompts, and the chat template, which lm-eval asks for."""
        del request
        tokenizer = self._service.engine.model.tokenizer
        if tokenizer is None:
            raise ApiError(404, "expected a model with a tokenizer, got one without")
        names = {"eos_token": min(tokenizer.eos_token_ids, default=None), "bos_token": tokenizer.bos_token_id}
        texts = {name: None if token is None else tokenizer.id_to_token(token) for name, token in names.items()}
        return json_response({**texts, "pad_token": texts["eos_token"], "chat_template": tokenizer.chat_template})


def _parse_prompt(fields: Fields) -> tuple[Encode, int]:
    """Read a text. Returns a function that encodes it, and its length in characters. Raises ApiError."""
    text, adds = fields.take("prompt"), fields.take("add_special_tokens")
    if not isinstance(text, str):
        raise fields.error("prompt", "a text")
    fields.check_unicode("prompt", text)
    if not isinstance(adds, bool | None):
        raise fields.error("add_special_tokens", "true or false")
    return partial(_encode_text, text, adds=adds is not False), len(text)


def _parse_chat(fields: Fields, tool_format: ToolFormat) -> tuple[Encode, int]:
    """Read the messages of a chat. Returns a function that encodes them, and their length in characters.

    Raises ApiError.
    """
    messages, values = parse_messages(fields.take("messages")), parse_template_values(fields)
    begins_answer = fields.take("add_generation_prompt")
    if not isinstance(begins_answer, bool | None):
        raise fields.error("add_generation_prompt", "true or false")
    fields.refuse("continue_final_message", (False,), "this server lets the model begin a message of its own")
    fields.refuse("add_special_tokens", (False,), "the model's template adds them")
    tools = parse_tools(fields)
    length = num_message_chars(messages) + num_chars(values) + (0 if tools is None else num_chars(tools.definitions))
    return partial(_encode_chat, messages, values, tools, tool_format, begins_answer=begins_answer is not False), length


def _encode_text(text: str, tokenizer: Tokenizer | None, *, adds: bool) -> list[list[int]]:
    if tokenizer is None:
        raise ApiError(400, "prompt: expected a model with a tokenizer, got one without", param="prompt")
    return [tokenizer.encode(text, parse_special=True, add_special_tokens=adds)]  # as of a completion


def _encode_chat(
    messages: Sequence[Message],
    values: Mapping[str, Any],
    tools: ToolUse | None,
    tool_format: ToolFormat,
    tokenizer: Tokenizer | None,
    *,
    begins_answer: bool,
) -> list[list[int]]:
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ApiError(400, "messages: expected a prompt, since this model has no chat template", param="messages")
    return [encode_chat(tokenizer, messages, values, tools, tool_format, begins_answer=begins_answer)]
