"""Requests that share a prefix, one after another: each prefix is computed once and used up before it is evicted.

The next request is the one that has most tokens in common with the one admitted last. In the tree of prompts this is a
depth-first walk: the request that shares most goes first, then one that shares a little less. When no request shares a
block, the oldest one begins another group. Unlike the order by longest cached prefix, this order works with an empty
cache. It also brings requests that read the same blocks into one batch, which cascade attention uses.
"""

from collections.abc import Sequence as Items

from kvblocks.core.sequence import Sequence
from kvblocks.engine.schedule.lookups import Lookups
from kvblocks.engine.schedule.order import AgingOrder
from kvblocks.engine.schedule.request import Request


class GroupedOrder(AgingOrder):
    """Ranks candidates by the full blocks that they have in common with the request admitted last; ties by arrival.

    Cost: no lookup, but at most `num_candidates` comparisons of prompts for each candidate. Keeps a reference to the
    sequence that was admitted last.
    """

    _last: Sequence | None = None
    _block_size = 1

    def start(self, candidates: Items[Request], lookups: Lookups) -> None:  # noqa: ARG002
        """Learn the block size. O(1)."""
        self._block_size = lookups.manager.block_size

    def choose(self, candidates: Items[Request]) -> Request:
        """Return the candidate that shares most with the last admitted one; ties go to the oldest.

        O(their tokens), by memcmp.
        """
        last = self._last
        if last is None or len(candidates) == 1:
            return candidates[0]
        return max(candidates, key=lambda request: num_common_blocks(last, request.sequence, self._block_size))

    def note_admitted(self, request: Request) -> None:
        """Rank by this request from now on. O(1)."""
        self._last = request.sequence


def num_common_blocks(one: Sequence, other: Sequence, block_size: int) -> int:
    """Return how many first blocks two sequences could share by their tokens, salt and adapter.

    Extra keys, such as those of images, are not compared, since this only ranks. O(tokens), by bisection with memcmp.
    """
    if one.salt != other.salt or one.lora != other.lora:
        return 0
    low, high = 0, min(one.num_tokens, other.num_tokens) // block_size
    tokens, others, num_bytes = one.packed_tokens(), other.packed_tokens(), 4 * block_size
    while low < high:  # the first `low` blocks are equal; block `high` differs or doesn't exist
        middle = (low + high + 1) // 2
        part = slice(low * num_bytes, middle * num_bytes)
        if bytes(tokens[part]) == bytes(others[part]):
            low = middle
        else:
            high = middle - 1
    return low
