"""Several groups of layers over one pool: those that attend to everything, and those with windows.

`kinds` is what an engine says of its layers, `plan` finds it for a model, and `layout` is what follows from it. The
others extend the core: `index` has the blocks beside the primary group's, `anchors` stand in for a primary group that
is missing, `pool`, `tables`, `need`, `slots`, `caching`, `hit` and `pins` do for several groups what the core does for
one.
"""

from kvblocks.groups.kinds import FullAttention, Group, SlidingWindow

__all__ = ["FullAttention", "Group", "SlidingWindow"]
