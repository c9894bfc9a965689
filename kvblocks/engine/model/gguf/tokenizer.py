"""The tokenizer of a GGUF file, as the text of tokenizer.json and the fields of tokenizer_config.json.

A file names its tokenizer by two keys: `tokenizer.ggml.model`, and for byte-level BPE `tokenizer.ggml.pre`, which says
how a text is split before merges. The splits here are those of the models' published tokenizers.
"""

from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.gguf.metadata import Metadata

_CONTROL, _USER_DEFINED = int(gguf.TokenType.CONTROL), int(gguf.TokenType.USER_DEFINED)

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS = {"llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}
"""How a text is split before merges, by `tokenizer.ggml.pre`."""

_DIGITS_CUTS = ("smollm",)
_PLAIN_CUTS = ("gpt-2", "default")
_ADDS_BOS = ("llama-bpe",)  # unless the file says something else
_SPACE = "\u2581"


def tokenizer_parts(metadata: Metadata, max_length_tokens: int) -> tuple[str, dict[str, Any]]:
    """The text of tokenizer.json, and the fields of tokenizer_config.json.

    Raises ModelError for a kind of tokenizer that is not supported. Takes seconds for 250,000 tokens.
    """
    kind = metadata.value("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"expected a GGUF file with tokenizer.ggml.model gpt2 or llama, got {kind!r}")
    tokenizer = _byte_level(metadata) if kind == "gpt2" else _sentence_piece(metadata)
    texts: list[str] = metadata.value("tokenizer.ggml.tokens")
    types: list[int] = metadata.value("tokenizer.ggml.token_type")
    _add(tokenizer, texts, types, _CONTROL, is_special=True)
    _add(tokenizer, texts, types, _USER_DEFINED, is_special=False)
    special = _special_tokens(metadata, texts)
    adds_bos = kind == "llama" or metadata.optional("tokenizer.ggml.pre", "default") in _ADDS_BOS
    for key in ("tokenizer.ggml.add_bos", "tokenizer.ggml.add_bos_token"):  # the first one is of older files
        adds_bos = metadata.flag(key, default=adds_bos)
    if metadata.flag("tokenizer.ggml.add_eos_token", default=False):
        raise ModelError("expected a GGUF file with tokenizer.ggml.add_eos_token = False, got True")
    if adds_bos and "bos_token" in special:
        bos, bos_id = special["bos_token"], metadata.number("tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, bos_id)]
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # "read tokenizer.json as it is"
        "model_max_length": max_length_tokens,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    template = metadata.optional("tokenizer.chat_template", None)
    return tokenizer.to_str(), config if template is None else {**config, "chat_template": template}


def _special_tokens(metadata: Metadata, texts: list[str]) -> dict[str, str]:
    """The texts of the tokens that a folder names, by the folder's names."""
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    special = {}
    for name, key in names.items():
        if metadata.has(f"tokenizer.ggml.{key}_token_id"):
            index = metadata.number(f"tokenizer.ggml.{key}_token_id")
            if not 0 <= index < len(texts):
                raise ModelError(f"expected {key}_token_id of the GGUF file to be below {len(texts)}, got {index}")
            special[name] = texts[index]
    return special


def _byte_level(metadata: Metadata) -> Tokenizer:
    """Byte-level BPE, as GPT-2 has it."""
    pre = metadata.optional("tokenizer.ggml.pre", "default")
    known = (*_CUTS, *_DIGITS_CUTS, *_PLAIN_CUTS)
    if pre not in known:
        raise ModelError(f"expected a GGUF file with tokenizer.ggml.pre {', '.join(known)}, got {pre!r}")
    merges = [(left, right) for left, right in (m.split(" ") for m in metadata.value("tokenizer.ggml.merges"))]
    vocab = {text: index for index, text in enumerate(metadata.value("tokenizer.ggml.tokens"))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre in _CUTS:
        cut: Any = pre_tokenizers.Split(Regex(_CUTS[pre]), behavior="isolated")
        steps = [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        steps = [pre_tokenizers.Digits(individual_digits=True)] if pre in _DIGITS_CUTS else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: Metadata) -> Tokenizer:
    """SentencePiece's BPE, as Llama 2 and Gemma have it: whatever is no token is spelled in bytes.

    A file has the tokens' scores and no merges. Two neighbors are merged if what they make has the best score.
    """
    texts: list[str] = metadata.value("tokenizer.ggml.tokens")
    scores: list[float] = metadata.value("tokenizer.ggml.scores")
    vocab = {text: index for index, text in enumerate(texts)}
    unknown = texts[metadata.number("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(
        vocab=vocab, merges=_merges(texts, scores, vocab), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    adds_space = metadata.flag("tokenizer.ggml.add_space_prefix", default=True)
    first: list[Any] = [normalizers.Prepend(_SPACE)] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    last: list[Any] = [decoders.Strip(content=" ", left=1)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return tokenizer


def _merges(texts: list[str], scores: list[float], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the best score first; of one token, those of the earliest tokens first."""
    ranked = []
    for text, score in zip(texts, scores, strict=True):
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [(vocab[left], vocab[right], left, right) for left, right in pairs if left in vocab and right in vocab]
        ranked += [(score, left, right) for _, _, left, right in sorted(known)]
    ranked.sort(key=lambda merge: -merge[0])
    return [(left, right) for _, left, right in ranked]


def _add(tokenizer: Tokenizer, texts: list[str], types: list[int], kind: int, *, is_special: bool) -> None:
    """Tell the tokenizer of the tokens of one type, which are found before a text is cut."""
    tokens = [
        AddedToken(text, special=is_special, normalized=False)
        for text, its_kind in zip(texts, types, strict=True)
        if its_kind == kind
    ]
    if is_special:
        tokenizer.add_special_tokens(tokens)
    else:
        tokenizer.add_tokens(tokens)
