"""One group of layers with full attention: all that a block table with exact prefix caching needs, and nothing else.

The facade calls `slots`, `slots` calls `pool`, and `pool` calls `free_queue` and `prefix_index`. Read the modules in
this order:

- `tokens`: what a block holds, as bytes; `kvblocks.hashing`, below this room, has its extra keys and its digest;
- `block`: a block of the pool, and the run of cached blocks that it belongs to;
- `prefix_index`: the exact map from prefixes to blocks, and why a hit is never wrong;
- `free_queue`: the blocks without an owner, in the order in which they are reused;
- `pool`: combines index and queue, and says what happens to a block's contents when it is reused;
- `sequence`: a request's tokens and its block table; `hit`: what a lookup found for it;
- `caching`: when a sequence's blocks become cached; `slots` and `steps`: how a sequence gets blocks;
- `in_flight`: which tokens a sequence is about to compute;
- `change`: how a call that was left half done is noticed; `hooks`: where the other rooms plug in.

`kvblocks.manager` is the facade over these modules. Of other rooms they import `kvblocks.hashing` alone.
"""
