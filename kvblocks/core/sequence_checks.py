"""Whether what a call was given are sequences, and a hit: said in one place, and asked where it costs nothing."""

from typing import Any

from kvblocks.arguments import is_a, listed, wrong
from kvblocks.core.hit import CacheHit
from kvblocks.core.sequence import Sequence
from kvblocks.errors import InvalidArgumentError


def not_a_sequence(call: str, value: object) -> InvalidArgumentError:
    """Return the error that says that `value` is no sequence."""
    return wrong(call, "a Sequence", value)


def as_sequence(call: str, value: object) -> Sequence:
    """Return `value` if it is a sequence, else raise InvalidArgumentError."""
    given: Any = value
    if not is_a(given, Sequence):
        raise not_a_sequence(call, value)
    sequence: Sequence = given
    return sequence


def check_start(sequence: object, hit: object) -> None:
    """Raise InvalidArgumentError unless these are a sequence, and a hit or None."""
    as_sequence("allocate_slots", sequence)
    if hit is not None and not is_a(hit, CacheHit):
        raise wrong("allocate_slots: hit", "what get_computed_blocks returned, or None", hit)


def check_step(sequences: list[Any], num_tokens: int) -> None:
    """Raise InvalidArgumentError unless these are different sequences, as many as tokens."""
    for sequence in sequences:
        as_sequence("append_step", sequence)
    num_different = len(set(sequences))
    if not num_different == len(sequences) == num_tokens:
        got = f"{len(sequences)} sequences, {num_different} of them different, and {num_tokens} tokens"
        raise InvalidArgumentError(f"append_step: expected different sequences and a token for each, got {got}")


def check_no_step(token_ids: Any) -> None:
    """Raise InvalidArgumentError unless a step of no sequence has no token either."""
    if not (is_a(token_ids, bytes) and not token_ids):
        check_step([], len(listed("token_ids", "an iterable of ints", token_ids)))
