"""Voices: how an answer is said, whole or as a stream."""

from kvblocks.engine.completion import Piece
from kvblocks.server.answer import Answer
from kvblocks.server.errors import ApiError
from kvblocks.server.wire import DONE, encode_event, encode_in_parts, encode_json


class Voice:
    """OpenAI's, for completions and chats; other protocols derive theirs from it. One object an answer.

    The calls of a stream are `begin` with its first pieces, `say` for all pieces, and then `end` or `fail`.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def begin(self, piece: Piece) -> bytes:
        """Return what comes before all else. piece: the first one."""
        del piece
        return b""

    def say(self, pieces: list[Piece]) -> bytes:
        """Return the events for pieces."""
        return b"".join([encode_event(chunk) for piece in pieces for chunk in self.answer.chunks(piece)])

    def end(self) -> bytes:
        """Return what comes last, of a whole answer."""
        usage = encode_event(self.answer.usage_chunk()) if self.answer.asked.include_usage else b""
        return usage + DONE

    def fail(self, error: ApiError) -> bytes:
        """Return what comes last if the answer isn't whole."""
        return encode_event(error.to_json())

    def whole(self) -> bytes:
        """Return the body of a whole answer."""
        body = self.answer.body()
        return encode_in_parts(body, "choices") if "choices" in body else encode_json(body)


def named_event(name: str, value: object) -> bytes:
    """Return a value as an event with a name, as Anthropic's and Responses' streams have them."""
    return b"event: " + name.encode() + b"\n" + encode_event(value)
