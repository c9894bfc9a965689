"""Which copies of states an engine has to make, as records of plain values."""

from typing import Literal, NamedTuple

CopyKind = Literal["clear", "restore", "fork", "save"]


class StateCopy(NamedTuple):
    """A copy of a state that the engine has to make. position: how many tokens the state is after.

    kind is one of:

    - "clear": write zeros, or whatever a new sequence begins with, to `slot`;
    - "restore": copy the blocks `block_ids` to `slot`;
    - "fork": copy the slot `source` to `slot`;
    - "save": copy `slot` to the blocks `block_ids`.

    A state lies in blocks in the order of `block_ids`. source: -1 unless the kind is "fork".
    """

    kind: CopyKind
    position: int
    slot: int
    source: int = -1
    block_ids: tuple[int, ...] = ()
