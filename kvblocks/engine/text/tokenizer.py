"""Text to token ids and back, from the tokenizer.json of a Hugging Face folder.

This module decides which text may become a special token, decodes streams, and turns chats into prompts (with
chat_template.py).

Invariants:
- Unless the caller says `parse_special=True`, no part of a text becomes a special token. So users can't end their turn
  by writing "<|im_end|>". In a chat, only the template's own markup becomes special tokens. Special tokens are those
  that tokenizer.json marks (`"special": true`). One limit: if special tokens are matched after normalization
  (`"normalized": true`, as in older Llama 2 folders), chats are protected only against their exact text.
- For text without the texts of special tokens, ids are those of `transformers`' AutoTokenizer.
- The joined pieces of a StreamDecoder equal `decode` of all ids, and no piece ends inside a character.

The encoding itself is done by the `tokenizers` library.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from kvblocks.engine.errors import ModelError
from kvblocks.engine.text.chat_template import ChatTemplate, Message, token_text
from kvblocks.engine.text.token_bytes import TokenBytes
from kvblocks.errors import InvalidArgumentError, InvalidTokensError

__all__ = ["StreamDecoder", "Tokenizer"]

_CONFIGS = ("tokenizer_config.json", "generation_config.json", "config.json")
_REPLACEMENT = "\ufffd"  # decoding gives this for bytes that are not, or not yet, a character
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """A model's tokenizer. Calls change no state, so threads may share it.

    Attributes: `num_tokens` (all ids are below it; a model's vocabulary may be padded further), `special_token_ids`,
    `eos_token_ids` (each of them ends a generation), `bos_token_id` (None if the model has none), `byte_token_ids`
    (tokens that stand for one byte of a character), `has_chat_template`, `longest_token` (the number of characters of
    the longest token, as the vocabulary spells it).
    """

    def __init__(
        self, definition: str, configs: Mapping[str, Mapping[str, Any]], template: ChatTemplate | None
    ) -> None:
        """`definition` is the text of tokenizer.json; `configs` the folder's other JSON files by name, {} for a
        missing one.

        Raises ModelError if the definition is not one that the `tokenizers` library reads. Most callers want
        `from_folder`.
        """
        # There are two, because parsing special tokens is a setting of the object, not of the call.
        self._markup = _load_definition(definition)
        self._plain = _load_definition(definition)
        self._plain.encode_special_tokens = True  # this encodes their text as any other text
        self._template = template
        added_tokens = self._markup.get_added_tokens_decoder()
        self._special_texts = frozenset(token.content for token in added_tokens.values() if token.special)
        self.special_token_ids = frozenset(index for index, token in added_tokens.items() if token.special)
        vocabulary = self._markup.get_vocab(with_added_tokens=True)
        self.num_tokens = 1 + max(vocabulary.values(), default=-1)
        self.longest_token = max(map(len, vocabulary), default=1)
        parsed = json.loads(definition)
        self._bytes = TokenBytes(self._markup, parsed)
        has_byte_fallback = "ByteFallback" in json.dumps(parsed.get("decoder"))
        self.byte_token_ids = frozenset(
            index for text, index in vocabulary.items() if has_byte_fallback and _BYTE_TOKEN.fullmatch(text)
        )
        self.bos_token_id = vocabulary.get(token_text(configs["tokenizer_config.json"].get("bos_token")) or "")
        self.eos_token_ids = _eos_token_ids(configs, vocabulary)

    @classmethod
    def from_folder(cls, folder: Path | str) -> "Tokenizer":
        """The tokenizer of a Hugging Face folder, from tokenizer.json and the JSON files beside it.

        Raises ModelError if tokenizer.json is missing or unreadable, or another file is broken. About 0.2 s for
        50,000 tokens.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"expected a Hugging Face folder with tokenizer.json, got {folder} without one")
        configs = {name: _read_object(folder / name) for name in _CONFIGS}
        template = ChatTemplate.from_folder(folder, configs["tokenizer_config.json"])
        try:
            return cls(path.read_text(encoding="utf-8"), configs, template)
        except (ModelError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: {error}") from error

    @classmethod
    def from_text(cls, definition: str, configs: Mapping[str, Mapping[str, Any]]) -> "Tokenizer":
        """As `from_folder`, from the text of tokenizer.json and the parsed other files, by name. Raises ModelError."""
        whole = {name: configs.get(name, {}) for name in _CONFIGS}
        return cls(definition, whole, ChatTemplate.from_config(whole["tokenizer_config.json"]))

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works; a base model's folder has no template."""
        return self._template is not None

    @property
    def definition(self) -> str:
        """The content of tokenizer.json, as text. O(vocabulary)."""
        return self._markup.to_str()

    @property
    def chat_template(self) -> str | None:
        """The template's source; None if there is none."""
        return None if self._template is None else self._template.source

    @property
    def template_variables(self) -> frozenset[str]:
        """The names that the chat template reads, such as "tools"; none if there is no template."""
        return frozenset() if self._template is None else self._template.variables

    @property
    def special_texts(self) -> dict[str, int]:
        """The texts of the special tokens, with their ids. O(special tokens)."""
        added = self._markup.get_added_tokens_decoder().items()
        return {token.content: index for index, token in added if token.special}

    def encode(self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`.

        `parse_special`: whether "<|im_end|>" and the like become special tokens instead of text. Turn this on only for
        text that no user wrote. `add_special_tokens`: whether to add the tokens that tokenizer.json adds to every
        prompt (a BOS, for some models).

        Raises InvalidArgumentError if the text is not valid Unicode. O(len(text)). Releases the interpreter's lock.
        """
        encoder = self._markup if parse_special else self._plain
        try:
            # A batch of one, since `encode` would keep the interpreter's lock: seconds, for millions of characters.
            ids: list[int] = encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:  # the library raises this for a lone surrogate
            raise InvalidArgumentError(f"expected text of valid Unicode, got {text!r:.100}") from error
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the ids. Bytes that aren't a character become U+FFFD; unknown ids have no text.

        Raises InvalidTokensError if an id is not an integer from 0 to 2**32 - 1. O(ids).
        """
        try:
            return self._markup.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidTokensError(f"expected ids from 0 to 2**32 - 1, got {list(token_ids)!r:.100}") from error

    def id_to_token(self, token_id: int) -> str | None:
        """The token with this id, as the vocabulary spells it (not as text), or None for an unknown id."""
        return self._markup.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for: a special token's are those of its text, an unknown id has b"".

        A character may be split among several tokens, so the bytes may be invalid UTF-8. O(length of the token).
        """
        return self._bytes.of(token_id)

    def apply_chat_template(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a chat, in the form that the model was trained on.

        `messages` are {"role": ..., "content": ...}, with other fields that the template may read.
        `add_generation_prompt`: whether the prompt ends where the assistant's answer begins. `variables`: more values
        for the template, such as tools. Special tokens that are written in messages are encoded as text; otherwise the
        ids are those of `transformers`.

        Raises ModelError if the model has no template, and InvalidArgumentError if the template refuses the messages.
        O(length).
        """
        if self._template is None:
            raise ModelError(
                "expected a chat template in chat_template.jinja or tokenizer_config.json, got none: "
                "this is a base model, so give it a prompt of text"
            )
        spans = self._template.render(
            messages, self._special_texts, add_generation_prompt=add_generation_prompt, variables=variables or {}
        )
        encoded = (self.encode(text, parse_special=is_markup, add_special_tokens=False) for text, is_markup in spans)
        return [token_id for piece in encoded for token_id in piece]


class StreamDecoder:
    """Decodes ids as they are generated: pass them to `feed`, and call `finish` at the end.

    The returned texts, joined, are always a prefix of the text of all ids, and at the end the whole text. Text is held
    back only while later ids could still change it: an unfinished character, or a sequence of byte tokens.
    """

    # A token's text depends on its neighbors only at the beginning (some decoders strip the first space) and where a
    # character is spread over tokens. So decoding starts at the last token at which a character ended, and skips that
    # token's own text.

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self.reset()

    def reset(self) -> None:
        """Begin again, as if nothing had been fed. O(1)."""
        self._window: list[int] = []
        self._num_returned = 0  # characters of the window's text

    def feed(self, token_ids: Iterable[int]) -> str:
        """Return the text that these ids complete: "" while a character isn't finished.

        Raises InvalidTokensError as `Tokenizer.decode` does, and then changes nothing. O(ids), unless many ids in a row
        spell no valid text.
        """
        ids = list(token_ids)
        try:
            self._window += [index for index in ids if index not in self._skipped_ids and self._is_token(index)]
        except (OverflowError, TypeError):
            self._tokenizer.decode(ids)  # raises an error that names them
            raise
        if not self._window or self._window[-1] in self._tokenizer.byte_token_ids:
            return ""
        text = self._decode(self._window)
        is_whole = not text.endswith(_REPLACEMENT)
        num_certain = len(text) if is_whole else max(self._num_returned, len(text) - 1)
        piece = text[self._num_returned : num_certain]
        self._num_returned = num_certain
        if is_whole:
            self._window = self._window[-1:]
            self._num_returned = len(self._decode(self._window))
        return piece

    def finish(self) -> str:
        """Return the text that was held back, with U+FFFD for an unfinished character. Resets the decoder."""
        piece = self._decode(self._window)[self._num_returned :]
        self.reset()
        return piece

    def _is_token(self, token_id: int) -> bool:
        return self._tokenizer.id_to_token(token_id) is not None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _load_definition(definition: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"expected the definition of a tokenizer, got an error: {error}") from error
    tokenizer.no_truncation()  # some folders still have training's settings for truncation and padding
    tokenizer.no_padding()
    return tokenizer


def _eos_token_ids(configs: Mapping[str, Mapping[str, Any]], vocabulary: Mapping[str, int]) -> frozenset[int]:
    """The ids in generation_config.json, or else in config.json, or else the tokenizer's, as in `transformers`."""
    for name in ("generation_config.json", "config.json"):
        value = configs[name].get("eos_token_id")
        if value is not None:
            return frozenset(value) if isinstance(value, list) else frozenset([value])
    eos_token_id = vocabulary.get(token_text(configs["tokenizer_config.json"].get("eos_token")) or "")
    return frozenset() if eos_token_id is None else frozenset([eos_token_id])


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"expected {path} to be JSON, got an error: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"expected {path} to be a JSON object, got {type(value).__name__}")
    return value
