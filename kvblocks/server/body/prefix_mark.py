"""A prefix of a chat that a client marks, so that it stays cached."""

from dataclasses import dataclass

from kvblocks.server.body.messages import Message


@dataclass(frozen=True, slots=True)
class PrefixMark:
    """A prefix of a chat that is to stay cached for so many seconds. variant: a chat that has it, and then parts."""

    ttl_s: float
    variant: tuple[Message, ...]
