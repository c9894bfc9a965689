"""The errors that kvblocks raises.

Every error that a caller can cause is a `KVBlocksError`; its kinds are what a caller can act on. A message says what
was expected and what it got. An operation that raises one of them has changed nothing.
"""


class KVBlocksError(Exception):
    """Base of every error that kvblocks raises on purpose."""


class InvalidArgumentError(KVBlocksError, ValueError):
    """A value that no state of the manager could make right: fix the call."""


class InvalidTokensError(InvalidArgumentError):
    """Token ids that are not integers from 0 to 2**32 - 1, or none at all."""


class NoTokensError(InvalidTokensError):
    """No token ids, where at least one is needed."""


class SequenceStateError(KVBlocksError):
    """The sequence is not in the state that the call needs: unknown, foreign, freed, or already allocated."""


class StaleHitError(KVBlocksError):
    """A cache hit whose blocks were evicted after the lookup: look it up again."""


class BlockStateError(KVBlocksError):
    """A block is not in the state that the call needs: freed twice, or linked twice."""


class PoolExhaustedError(KVBlocksError):
    """More blocks were asked than can be had. The manager answers None; the engine's scheduler raises this."""


class CorruptStateError(KVBlocksError):
    """An earlier call was left half done, by a KeyboardInterrupt for example: make a new manager, or cache.

    Every call that uses more than counters raises it from then on, unless its arguments are wrong. Also raised to a
    call that is made in the middle of another one's change, by a finalizer or a signal handler; then the object is fine
    once that one has ended.
    """


class PinBudgetError(KVBlocksError):
    """A pin would make all pins together hold more of the pool than they may: unpin something, or pin less."""


class UnsupportedEngineError(KVBlocksError):
    """The engine around an integration lacks a part that it uses, or is asked for something that it doesn't serve.

    The message names it. Nothing has changed, and what can be seen before the engine runs is said before it runs.
    """
