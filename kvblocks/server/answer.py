"""The answer to one request: what was generated so far, and its form in OpenAI's JSON.

An answer belongs to the event loop. The engine's thread only passes it on, and only reads its id and its request, which
never change.
"""

import asyncio
import time
import uuid
from collections import Counter, deque

from kvblocks.engine.completion import Completion, Piece
from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.server.answers.logprobs import ChoiceWriter, Echo
from kvblocks.server.errors import ApiError
from kvblocks.server.misses.comparison import Comparison
from kvblocks.server.misses.record import openais
from kvblocks.server.pins.marked_pins import MarkOutcome
from kvblocks.server.requests import AnswerKind, AnswerRequest
from kvblocks.server.service_metrics import RequestOutcome
from kvblocks.server.tools.calls import ToolCall
from kvblocks.server.tools.reader import CallReader
from kvblocks.server.wire import Json

_PREFIXES = {"completion": "cmpl-", "chat": "chatcmpl-", "warm": "warm-"}
_NO_TOKEN = -1


class Answer:
    """The answer to the request `asked`, with one choice for each sample of each prompt.

    tiers: the names of the engine's tiers below the device, for which cached tokens are counted separately. tokenizer:
    decodes the tokens of log probabilities and echoes.

    model: the model's name. answer_id: the answer's name for clients and logs. start_s: when its request came, by
    `time.monotonic`; None: now. prompts: the prompts as tokens, once it is submitted. has_begun: whether any token has
    been generated. outcome: None until it ends. timer: ends it after the time limit. compared: the comparison with the
    request that its own request named; marked: what became of its request's marks. Both are set before the first piece
    comes.
    """

    def __init__(
        self,
        asked: AnswerRequest,
        model: str,
        tiers: tuple[str, ...] = (),
        tokenizer: Tokenizer | None = None,
        *,
        start_s: float | None = None,
    ) -> None:
        self.asked = asked
        self.model = model
        self.prompts: list[list[int]] = []
        self._tiers = tiers
        self._tokenizer = tokenizer
        self.answer_id = (asked.id_prefix or _PREFIXES[asked.kind]) + uuid.uuid4().hex
        self.start_s = time.monotonic() if start_s is None else start_s
        self.has_begun = False
        self.outcome: RequestOutcome | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._num_said: Counter[int] = Counter()  # tokens of each choice that a stream has sent
        self._head: Json = {"id": self.answer_id, "object": "", "created": int(time.time()), "model": model}
        self._pieces: deque[Piece] = deque()  # not taken yet
        self._completions: dict[int, Completion] = {}  # by choice
        self._writers: dict[int, ChoiceWriter] = {}  # of choices of which a stream has sent a part
        self._readers: dict[int, CallReader] = {}  # of choices that may call tools
        self._num_called: Counter[int] = Counter()  # calls of each choice that a stream has sent
        self.compared: Comparison | None = None
        self.marked: tuple[MarkOutcome, ...] = ()
        self._error: ApiError | None = None
        self._news = asyncio.Event()

    @property
    def is_whole(self) -> bool:
        """Whether all choices have ended. O(1)."""
        return len(self._completions) == self.asked.num_choices

    def put(self, piece: Piece) -> None:
        """Add a generated piece. O(1)."""
        self.has_begun = True
        self._pieces.append(piece)
        if piece.completion is not None:
            self._completions[self._choice(piece)] = piece.completion
        self._news.set()

    def put_warmed(self, prompt_index: int, completion: Completion) -> None:
        """Note that a prompt was computed and that nothing is generated for it. O(1)."""
        self._completions[prompt_index] = completion
        if self.asked.kind != "warm":  # the answer is only an echo
            of_prompt = completion.prompt_logprobs
            self._pieces.append(Piece(prompt_index, _NO_TOKEN, "", completion, prompt_logprobs=of_prompt))
            self._news.set()

    def end(self, outcome: RequestOutcome, error: ApiError | None = None) -> None:
        """End the answer; call it only once. error: tells the client why it isn't complete. O(1)."""
        self.outcome = outcome
        self._error = error
        if self.timer is not None:
            self.timer.cancel()
        self._news.set()

    async def take(self) -> list[Piece]:
        """Wait for pieces and return all; [] when the answer has ended.

        If it has an error, raise that after the pieces.
        """
        while not self._pieces and self.outcome is None:
            self._news.clear()
            await self._news.wait()
        if not self._pieces and self._error is not None:
            raise self._error
        pieces = list(self._pieces)
        self._pieces.clear()
        return pieces

    def completions(self) -> list[Completion]:
        """Return the completions of all choices that have ended, in order. O(choices)."""
        return [completion for _, completion in sorted(self._completions.items())]

    def stop_string(self, completion: Completion) -> str | None:
        """Return the stop string that has ended a choice, or None. O(text)."""
        stops = self.asked.options.get("stop") or ()
        if not stops or completion.finish_reason != "stop" or self._tokenizer is None:
            return None
        skips = self.asked.options.get("skip_special_tokens", True)
        text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=skips)
        found = [(at, -len(stop), stop) for stop in stops if (at := text.find(stop, len(completion.text))) >= 0]
        return min(found)[2] if found else None

    def body(self) -> Json:
        """Return the complete answer as JSON. Requires `is_whole`. O(tokens)."""
        if self.asked.kind == "warm":
            return {"prompts": [self._warmed_json(completion) for _, completion in sorted(self._completions.items())]}
        choices = [self._whole_choice(index, completion) for index, completion in sorted(self._completions.items())]
        kind = "chat.completion" if self.asked.kind == "chat" else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage(), **self._told()}

    def _whole_choice(self, index: int, completion: Completion) -> Json:
        written, logprobs = self._new_writer(index).write(
            completion.text, completion.token_ids, completion.logprobs, completion.prompt_logprobs
        )
        text: Json = {"text": written}
        if self.asked.kind == "chat":
            said, calls = self.read(index, written, is_last=True)
            called: Json = {"tool_calls": [_call_json(call) for call in calls]} if calls else {}
            content = said or None if calls else said
            text = {"message": {"role": "assistant", "content": content, "refusal": None, **called}}
        choice = {"index": index, **text, "logprobs": logprobs, "finish_reason": self.reason(index, completion)}
        return self._with_ids(choice, completion.token_ids)

    def chunks(self, piece: Piece) -> list[Json]:
        """Return a stream's chunks for a piece, in order; none if the piece is only a part of a character. O(1)."""
        choice, completion, is_chat = self._choice(piece), piece.completion, self.asked.kind == "chat"
        chunks = []
        if choice not in self._writers:
            self._writers[choice] = self._new_writer(choice)
            if is_chat:
                opening = {"index": choice, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
                said = self._with_ids({**opening, "finish_reason": None}, [])
                chunks.append(self._chunk([said], self._usage_so_far(piece)))
        writer = self._writers[choice]
        token_ids = [] if piece.token_id == _NO_TOKEN else [piece.token_id]
        self._num_said[choice] += len(token_ids)
        if piece.text or completion is not None or self.asked.return_token_ids or writer.must_write:
            written, logprobs = writer.write(
                piece.text, token_ids, None if piece.logprobs is None else [piece.logprobs], piece.prompt_logprobs
            )
            deltas: list[Json] = [{"text": written}]
            if is_chat:
                deltas = self._deltas(choice, written, is_last=completion is not None)
            if not deltas and (self.asked.return_token_ids or writer.must_write):
                deltas = [{"delta": {"content": ""}}]
            for index, delta in enumerate(deltas):
                is_end = index == len(deltas) - 1
                reason = self.reason(choice, completion) if completion is not None and is_end else None
                said = {"index": choice, **delta, "logprobs": logprobs if is_end else None, "finish_reason": reason}
                ids = token_ids if is_end else []
                chunks.append(self._chunk([self._with_ids(said, ids)], self._usage_so_far(piece)))
        return chunks

    def _deltas(self, choice: int, written: str, *, is_last: bool) -> list[Json]:
        """A chat's next deltas: text, then calls, each with its name first; none if nothing is certain yet."""
        said, calls = self.read(choice, written, is_last=is_last)
        deltas: list[Json] = [{"delta": {"content": said}}] if said else []
        for call in calls:
            index, begun = self._num_called[choice], _call_json(call)
            self._num_called[choice] += 1
            begun["function"] = {"name": call.name, "arguments": ""}
            deltas.append({"delta": {"tool_calls": [{"index": index, **begun}]}})
            more = {"index": index, "function": {"arguments": call.arguments}}
            deltas.append({"delta": {"tool_calls": [more]}})
        return [*deltas, {"delta": {}}] if is_last and (calls or not deltas) else deltas

    def read(self, choice: int, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Take a choice's next text.

        Return the text and the tool calls that are now certain; without tools all is text.
        """
        tools = self.asked.tools
        if tools is None or not tools.is_read:
            return text, []
        if choice not in self._readers:
            self._readers[choice] = CallReader(self.asked.tool_format, is_one=tools.is_one)
        return self._readers[choice].feed(text, is_last=is_last)

    def reason(self, choice: int, completion: Completion) -> str:
        """Return why a choice ended, in the terms of Chat Completions."""
        reader = self._readers.get(choice)
        has_called = reader is not None and reader.num_calls > 0
        return "tool_calls" if has_called and completion.finish_reason == "stop" else completion.finish_reason

    def usage_chunk(self) -> Json:
        """Return the last chunk, with the usage, which clients request by `include_usage`. O(choices)."""
        return {**self._chunk([]), "usage": self._usage(), **self._told()}

    def _told(self) -> Json:
        """What an answer tells beside itself: fields that weren't carried out, and a comparison that was asked for."""
        told: Json = {"warnings": list(self.asked.warnings)} if self.asked.warnings else {}
        asked, num_tokens = self.asked.compares_with, len(self.prompts[0]) if self.prompts else 0
        found = openais(self.compared, asked, num_tokens, 1)
        return told if found is None else {**told, "prompt_cache_diagnostics": found}

    def _choice(self, piece: Piece) -> int:
        """The index of the choice that a piece belongs to."""
        return piece.prompt_index * self.asked.options["n"] + piece.sample_index

    def _new_writer(self, choice: int) -> ChoiceWriter:
        """A new writer, at the beginning of a choice."""
        asked, index = self.asked, choice // self.asked.options["n"]
        echo = Echo.of(asked.prompts[index], self.prompts[index], self._tokenizer) if asked.echo else None
        kind: AnswerKind = "chat" if asked.kind == "chat" else "completion"
        has_logprobs = asked.options.get("logprobs") is not None
        skips = asked.options.get("skip_special_tokens", True)
        return ChoiceWriter(kind, self._tokenizer, has_logprobs=has_logprobs, echo=echo, skip_special_tokens=skips)

    def _with_ids(self, choice: Json, token_ids: list[int]) -> Json:
        return {**choice, "token_ids": token_ids} if self.asked.return_token_ids else choice

    def _chunk(self, choices: list[Json], so_far: Json | None = None) -> Json:
        kind = "chat.completion.chunk" if self.asked.kind == "chat" else "text_completion"
        usage: Json = {"usage": so_far} if self.asked.include_usage else {}
        return {**self._head, "object": kind, "choices": choices, **usage}

    def _usage_so_far(self, piece: Piece) -> Json | None:
        """The tokens of one choice, as in vLLM: of its prompt, and those that the stream has sent."""
        if not self.asked.continuous_usage:
            return None
        prompt, generated = len(self.prompts[piece.prompt_index]), self._num_said[self._choice(piece)]
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def _usage(self) -> Json:
        """The tokens of all choices. A prompt counts once, with its first sample, however many samples it has."""
        first_samples = [
            completion for choice, completion in self._completions.items() if not choice % self.asked.options["n"]
        ]
        num_prompt_tokens = sum(completion.num_prompt_tokens for completion in first_samples)
        num_completion_tokens = sum(len(completion.token_ids) for completion in self._completions.values())
        num_cached_tokens = sum(completion.num_cached_tokens for completion in first_samples)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": num_cached_tokens,
                "cached_tokens_by_tier": self.by_tier(first_samples),
            },
        }

    def _warmed_json(self, completion: Completion) -> Json:
        return {
            "num_prompt_tokens": completion.num_prompt_tokens,
            "num_cached_tokens": completion.num_cached_tokens,
            "num_cached_tokens_by_tier": self.by_tier([completion]),
            "num_computed_tokens": completion.num_computed_tokens,
            "seconds": round(completion.ttft_s, 6),
        }

    def by_tier(self, completions: list[Completion]) -> dict[str, int]:
        """Return the cached tokens of prompts, by the tier that they were loaded from."""
        loaded = {tier: sum(one.num_loaded_tokens.get(tier, 0) for one in completions) for tier in self._tiers}
        num_cached_tokens = sum(one.num_cached_tokens for one in completions)
        return {"device": num_cached_tokens - sum(loaded.values()), **loaded}


def _call_json(call: ToolCall) -> Json:
    """A call as Chat Completions has it."""
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
