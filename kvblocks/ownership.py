"""Which sequences hold blocks here, by their ids, and whether a call may be given this one.

A caller's id is hashed and compared by the caller's own code, which may raise. So a call asks for it before it changes
anything, and never again after that.
"""

from collections.abc import Hashable
from typing import Any

from kvblocks.arguments import Given, is_a, listed, shown, wrong
from kvblocks.cache_hit import CacheHit
from kvblocks.change import CHANGING, Changeable
from kvblocks.errors import InvalidArgumentError, KVBlocksError, SequenceStateError
from kvblocks.sequence import Sequence


class SequenceOwner(Changeable):
    """Owns sequences. A part of `KVCacheManager`; not made by itself."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__("manager", debug=debug)
        self._sequences: dict[Hashable, Sequence] = {}

    def _claim(self, sequence: Sequence, call: str) -> None:
        """Begin a change by entering a sequence under its id, which is hashed and compared before anything changes.

        Raises what those raise, and SequenceStateError when the id is in use; then no change is under way.
        """
        self.change_state = CHANGING  # `begin_change`, without the call: both callers have asked whether all is whole
        try:
            is_free = self._sequences.setdefault(sequence.sequence_id, sequence) is sequence
        except BaseException:
            self._unclaim(sequence)
            raise
        if not is_free:
            self.end_change()
            raise SequenceStateError(
                f"{call}: expected another sequence_id than {shown(sequence.sequence_id)}, which is in use"
            )

    def _unclaim(self, sequence: Sequence) -> None:
        """End a change of which nothing but the claim was made, or not even that. Asks for no id's hash. O(1)."""
        if self._sequences and next(reversed(self._sequences.values())) is sequence:
            self._sequences.popitem()
        self.end_change()

    def _keep(self, sequence: Sequence) -> None:
        """End a change that was to begin by taking a sequence out, unless it is out already. O(sequences)."""
        if id(sequence) in map(id, self._sequences.values()):  # by identity
            self.end_change()

    def _check_owned(self, sequence: Given[Sequence], call: str) -> Sequence:
        """Return `sequence` if it is one of ours, else raise SequenceStateError or InvalidArgumentError. O(1)."""
        if self.change_state:
            self.check_whole()
        try:
            own: Sequence = sequence  # type: ignore[assignment]  # compiled code looks at its type here
            owner = own.owner
        except (AttributeError, TypeError):
            raise not_a_sequence(call, sequence) from None
        if owner is not self or self._sequences.get(own.sequence_id) is not own:
            raise self._refusal(call, sequence)
        return own

    def _check_continued(self, sequence: Sequence, hit: CacheHit | None) -> int:
        self._check_owned(sequence, "allocate_slots")
        if hit is not None:
            raise SequenceStateError(f"allocate_slots: expected no hit, since {sequence} has blocks; got {hit}")
        return sequence.num_computed_tokens

    def _check_sequences(self, block_size: int, edge_size: int) -> None:
        """Raise AssertionError unless all sequences are here under their ids and agree with themselves."""
        for sequence_id, sequence in self._sequences.items():
            own_id: Any = sequence.sequence_id  # whose == may answer anything
            assert sequence.owner is self and own_id == sequence_id, f"{sequence}: not under its own id"
            sequence.check(block_size, edge_size)
            for table in [] if sequence.window_tables is None else sequence.window_tables.tables:
                table.check(sequence.num_computed_tokens)

    def _refusal(self, call: str, sequence: object) -> KVBlocksError:
        try:
            got = as_sequence(call, sequence).describe_for(self)
        except InvalidArgumentError as error:
            return error
        return SequenceStateError(f"{call}: expected a sequence allocated here, got {got}")

    def _check_appendable(self, sequence: Sequence, call: str) -> None:
        self._check_owned(sequence, call)
        if sequence.num_computed_tokens != sequence.num_tokens:
            got = f"{sequence.num_computed_tokens} slots for {sequence}"
            raise SequenceStateError(f"{call}: expected slots for all tokens, got {got}")


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
