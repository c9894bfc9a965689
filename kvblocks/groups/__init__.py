"""Several groups of layers over one pool: groups with full attention, with windows, with chunks.

`kinds` describes the groups of a model, `plan` computes them for a model, and `layout` derives what the manager needs.
The other modules extend the core: `index` keeps the attached blocks, `anchors` stand in for a missing primary group,
`loading` is for sequences that load from tiers, and `pool`, `tables`, `need`, `slots`, `caching`, `hit` and `pins` do
for several groups what the core does for one. `states` is for layers that keep one state per sequence.
"""

from kvblocks.groups.kinds import ChunkedLocal, FullAttention, Group, Scratch, SlidingWindow, kind_of_layers
from kvblocks.groups.states.copies import StateCopy
from kvblocks.groups.states.in_place import StateInPlace
from kvblocks.groups.states.kind import RecurrentState

__all__ = [
    "ChunkedLocal",
    "FullAttention",
    "Group",
    "RecurrentState",
    "Scratch",
    "SlidingWindow",
    "StateCopy",
    "StateInPlace",
    "kind_of_layers",
]
