"""Which copies of states an engine has to make: records of plain values."""

from typing import Literal, NamedTuple

CopyKind = Literal["clear", "restore", "fork", "save"]


class StateCopy(NamedTuple):
    """A copy of a state. position: how many tokens the state is after.

    kind: "clear" (zeros, or whatever a new sequence begins with, to `slot`), "restore" (the blocks `block_ids` to
    `slot`), "fork" (the slot `source` to `slot`) or "save" (`slot` to the blocks `block_ids`). A state lies in blocks
    in the order of `block_ids`. source: -1 unless it is a fork.
    """

    kind: CopyKind
    position: int
    slot: int
    source: int = -1
    block_ids: tuple[int, ...] = ()
