"""Voices: writers of answers in a protocol's format, complete or as a stream."""

from kvblocks.engine.completion import Piece
from kvblocks.server.answer import Answer
from kvblocks.server.errors import ApiError
from kvblocks.server.wire import DONE, encode_event, encode_in_parts, encode_json


class Voice:
    """Writes one answer in OpenAI's format for completions and chats. Other protocols have subclasses.

    For a stream, call `begin` with the first piece, `say` with all pieces, and then `end` or `fail`.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def begin(self, piece: Piece) -> bytes:
        """Return what comes before everything else. piece: the first piece."""
        del piece
        return b""

    def say(self, pieces: list[Piece]) -> bytes:
        """Return the events for pieces."""
        return b"".join([encode_event(chunk) for piece in pieces for chunk in self.answer.chunks(piece)])

    def end(self) -> bytes:
        """Return the end of a stream whose answer is complete."""
        usage = encode_event(self.answer.usage_chunk()) if self.answer.asked.include_usage else b""
        return usage + DONE

    def fail(self, error: ApiError) -> bytes:
        """Return the end of a stream whose answer isn't complete."""
        return encode_event(error.to_json())

    def whole(self) -> bytes:
        """Return the body of a complete answer."""
        body = self.answer.body()
        return encode_in_parts(body, "choices") if "choices" in body else encode_json(body)


def named_event(name: str, value: object) -> bytes:
    """Return a value as a named event, as in the streams of Anthropic's Messages and of Responses."""
    return b"event: " + name.encode() + b"\n" + encode_event(value)
