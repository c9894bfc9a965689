"""The errors that kvblocks raises.

Every error that a caller can cause is a `KVBlocksError`; its subclasses are the cases that a caller can act on. The
message says what was expected and what the call got. A call that raises one of them has changed nothing.
"""


class KVBlocksError(Exception):
    """Base of every error that kvblocks raises on purpose."""


class InvalidArgumentError(KVBlocksError, ValueError):
    """A value that is wrong whatever the state of the manager: fix the call."""


class InvalidTokensError(InvalidArgumentError):
    """Token ids that aren't integers from 0 to 2**32 - 1, or no token ids where some are needed."""


class NoTokensError(InvalidTokensError):
    """No token ids, where at least one is needed."""


class SequenceStateError(KVBlocksError):
    """The sequence is not in the state that the call needs: not allocated here, freed, or already allocated."""


class StaleHitError(KVBlocksError):
    """A hit whose blocks were evicted after the lookup: look the sequence up again."""


class BlockStateError(KVBlocksError):
    """A block, or a hold of blocks, is not in the state that the call needs: freed twice, for example."""


class PoolExhaustedError(KVBlocksError):
    """A call needs more blocks than are free. The manager returns None instead; the engine's scheduler raises this."""


class CorruptStateError(KVBlocksError):
    """An earlier call was left half done, for example by a KeyboardInterrupt: make a new manager, or a new cache.

    From then on every call raises this error, except those that only read counters. (Wrong arguments are reported
    first.) A call made in the middle of another call's change, by a finalizer or a signal handler, raises it too. In
    that case the object can be used again once the other call has ended.

    So does a manager's call that another thread makes during a call. A manager has no lock, and may be corrupt after
    that, with or without an error: make a new one, and let one thread at a time call it. A `PrefixCache` has a lock.
    """


class PinBudgetError(KVBlocksError):
    """With this pin, all pins would hold more of the pool than `pin_budget` allows: unpin something, or pin less."""


class UnsupportedEngineError(KVBlocksError):
    """The engine lacks a part that an integration uses, or asks for something that the integration doesn't support.

    The message names it, and nothing has changed. Whatever can be checked before the engine runs is checked then.
    """
