r"""Log probabilities and echoes as OpenAI's API shows them: one form for completions, another one for chats.

A token is shown as its text. A token that isn't made of complete characters is shown as its bytes, as in OpenAI's API:
`bytes:\xf0\x9f` in completions, `\xf0\x9f` in chats, whose entries also have a list of the bytes. So no two tokens look
alike, unless the vocabulary has the same text twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvblocks.engine.sampling.drawn import TokenLogprobs
from kvblocks.engine.text.tokenizer import StreamDecoder, Tokenizer
from kvblocks.server.wire import Json

LEAST = -9999.0
"""The smallest log probability to show, since JSON has no minus infinity. vLLM uses the same number."""

Kind = Literal["completion", "chat"]


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that an answer begins with: its tokens, and the text to show."""

    token_ids: Sequence[int]
    text: str

    @classmethod
    def of(cls, prompt: str | Sequence[int], token_ids: Sequence[int], tokenizer: Tokenizer | None) -> "Echo":
        """Return the echo of a prompt: a text unchanged, token ids as their text, with special tokens. O(prompt)."""
        if isinstance(prompt, str):
            return cls(token_ids, prompt)
        return cls(token_ids, "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=False))


class ChoiceWriter:
    """Writes one choice part by part: its text, and the value of its `logprobs`.

    kind: the endpoint that determines the form. tokenizer: decodes tokens; None: they are shown as "token_id:5", as in
    vLLM. has_logprobs: whether log probabilities were asked for. echo: what the first part begins with.
    skip_special_tokens: whether to leave them out of the text.
    """

    def __init__(
        self,
        kind: Kind,
        tokenizer: Tokenizer | None,
        *,
        has_logprobs: bool = False,
        echo: Echo | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        self._kind = kind
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._echo = echo
        self._names: dict[int, str] = {}
        self._offset = 0 if echo is None else len(echo.text)
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer, skip_special_tokens=skip_special_tokens)

    @property
    def must_write(self) -> bool:
        """Whether to write a part even if the next token has no text. O(1)."""
        return self._has_logprobs or self._echo is not None

    def write(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        of_prompt: Sequence[TokenLogprobs | None] | None,
    ) -> tuple[str, Json | None]:
        """Return the next part: its text, and its log probabilities. O(tokens x most likely tokens of each).

        logprobs, of_prompt: the log probabilities of these tokens and of the prompt's, if they were asked for.
        """
        echo, self._echo = self._echo, None
        shown = text if echo is None else echo.text + text
        if not self._has_logprobs:
            return shown, None
        if self._kind == "chat":
            entries = zip(token_ids, logprobs or (), strict=True)
            return shown, {"content": [self._entry(token, one) for token, one in entries], "refusal": None}
        offsets = [self._next_offset(token) for token in token_ids]
        if echo is not None:
            offsets = _prompt_offsets(echo, self._tokenizer) + offsets
            token_ids = [*echo.token_ids, *token_ids]
        every = [*((of_prompt or ()) if echo is not None else ()), *(logprobs or ())]
        return shown, {
            "tokens": [self._name(token) for token in token_ids],
            "token_logprobs": [None if one is None else max(one.logprob, LEAST) for one in every],
            "top_logprobs": [self._by_name(token, one) for token, one in zip(token_ids, every, strict=True)],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprobs: TokenLogprobs) -> Json:
        """A token in a chat."""
        top = [self._scored(one, logprob) for one, logprob in logprobs.top]
        return {**self._scored(token, logprobs.logprob), "top_logprobs": top}

    def _scored(self, token: int, logprob: float) -> Json:
        spelled = None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))
        return {"token": self._name(token), "logprob": max(logprob, LEAST), "bytes": spelled}

    def _by_name(self, token: int, logprobs: TokenLogprobs | None) -> dict[str, float] | None:
        """The log probabilities of the token and the likeliest ones, by name; of equal names, the largest."""
        if logprobs is None:
            return None
        found: dict[str, float] = {}
        for one, logprob in ((token, logprobs.logprob), *logprobs.top):
            name = self._name(one)
            found[name] = max(logprob, found.get(name, LEAST))
        return found

    def _name(self, token: int) -> str:
        name = self._names.get(token)
        if name is None:
            name = self._names[token] = self._new_name(token)
        return name

    def _new_name(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        spelled = self._tokenizer.token_bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            escaped = "".join(f"\\x{byte:02x}" for byte in spelled)
            return escaped if self._kind == "chat" else f"bytes:{escaped}"

    def _next_offset(self, token: int) -> int:
        """Where in the text a token begins; inside a character, where the character begins."""
        offset = self._offset
        if self._decoder is not None:
            self._offset += len(self._decoder.feed([token]))
        return offset


def _prompt_offsets(echo: Echo, tokenizer: Tokenizer | None) -> list[int]:
    """Where in the text of a prompt each token begins, at most at its end. O(prompt).

    Special tokens may be in the text, or added to it (a BOS). The reading that gives the text back is used.
    """
    offsets = [0] * len(echo.token_ids)
    if tokenizer is None:
        return offsets
    for skips in (False, True):
        decoder, total = StreamDecoder(tokenizer, skip_special_tokens=skips), 0
        for index, token in enumerate(echo.token_ids):
            offsets[index] = min(total, len(echo.text))
            total += len(decoder.feed([token]))
        if total + len(decoder.finish()) == len(echo.text):
            break
    return offsets
