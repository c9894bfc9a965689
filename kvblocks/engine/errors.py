"""The errors that the engine adds to `kvblocks.errors`."""

from kvblocks.errors import InvalidArgumentError, KVBlocksError


class ModelError(KVBlocksError):
    """A model cannot be used: its folder, configuration or weights are missing, broken, or of a kind not supported."""


class UnknownModelError(ModelError, InvalidArgumentError):
    """The name of a model is neither a known one nor a folder."""


class BrokenLogitsError(ModelError):
    """The model computed NaN: its weights or the KV cache are broken."""


class GrammarError(KVBlocksError):
    """An answer that must follow a grammar can't go on: no token may come, or finding one exceeds the work limit."""


class RequestTooLongError(InvalidArgumentError):
    """A prompt and its max_tokens together exceed the model's context, or don't fit into the whole pool."""


class ForgetError(KVBlocksError):
    """No lookup finds a salt's blocks any more, but some of their bytes are left in a tier.

    The message says what to do.
    """
