"""The errors that the engine adds to `kvblocks.errors`."""

from kvblocks.errors import InvalidArgumentError, KVBlocksError


class ModelError(KVBlocksError):
    """A model cannot be used: its folder, configuration or weights are missing, broken, or of a kind not supported."""


class UnknownModelError(ModelError, InvalidArgumentError):
    """The name of a model is neither a known one nor a folder."""


class BrokenLogitsError(ModelError):
    """The model computed NaN: its weights or the KV cache are broken."""


class GrammarError(KVBlocksError):
    """An answer of a given form can't go on: to find its next token takes more work than the limit for a token."""


class RequestTooLongError(InvalidArgumentError):
    """A prompt and its max_tokens are more tokens than the model's context, or the whole pool, has room for."""


class ForgetError(KVBlocksError):
    """Blocks of a salt can't be hit any more, but bytes of them are left in a tier. The message says what to do."""
