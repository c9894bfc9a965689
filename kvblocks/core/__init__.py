"""Block tables with exact prefix caching: all that decides which block holds what, and nothing else.

The facade calls `slots`, `slots` calls `pool`, and `pool` calls `free_queue` and `prefix_index`. Read the modules in
this order. First, one group of layers with full attention:

- `tokens`: what a block holds, as bytes; `kvblocks.hashing`, below this package, has its extra keys and its digest;
- `block`: a block of the pool, and the run of cached blocks that it belongs to;
- `prefix_index`: the exact map from prefixes to blocks, and why a hit is never wrong;
- `free_queue`: the blocks without an owner, in the order in which they are reused;
- `pool`: combines index and queue, and says what happens to a block's contents when it is reused;
- `sequence`: a request's tokens and its block table; `hit`: what a lookup found for it;
- `caching`: when a sequence's blocks become cached; `slots` and `steps`: how a sequence gets blocks;
- `in_flight`: which tokens a sequence is about to compute;
- `change`: how a call that was left half done is noticed; `hooks`: where other packages plug in; `link`: what a
  manager's parts share with it.

Then what other groups add. A manager of one group has none of it, and whatever asks finds None or an empty tuple:

- `kinds`: how an engine describes its layers; `layout`: what follows for a manager; `plan`: groups for a whole model;
- `attached`: cached blocks of other groups, at the blocks of the prefix index; `checkpoints`: saved states, likewise;
- `virtual_blocks`: what stands in for the first group where no group has full attention;
- `longest_hit`: what a hit needs of all groups; `loading`: what a start needs whose blocks come from tiers;
- `component`: what may stand beside the primary group's table; `side_slots`: groups with tables of their own, which
  `tables` are asked what a call takes and gives back;
- `states`, with `live_states`, `arriving_states` and `state_copy`: the states that layers keep in slots, and
  `manager_states`, the calls about them.

`kvblocks.manager` is the facade over these modules. They import `kvblocks.hashing`, and no package above.
"""
