"""A prefix of a chat that a client marks so that it stays cached."""

from dataclasses import dataclass

from kvblocks.server.body.messages import Message


@dataclass(frozen=True, slots=True)
class PrefixMark:
    """A prefix of a chat to keep cached for some seconds.

    variant: another chat that begins with it and then differs.
    """

    ttl_s: float
    variant: tuple[Message, ...]
