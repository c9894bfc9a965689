"""Several groups of layers over one pool: groups with full attention, and groups with windows.

`kinds` describes the groups of a model, `plan` computes them for a model, and `layout` derives what the manager needs.
The other modules extend the core: `index` keeps the attached blocks, `anchors` stand in for a missing primary group,
`loading` is for sequences that load from tiers, and `pool`, `tables`, `need`, `slots`, `caching`, `hit` and `pins` do
for several groups what the core does for one.
"""

from kvblocks.groups.kinds import FullAttention, Group, SlidingWindow

__all__ = ["FullAttention", "Group", "SlidingWindow"]
