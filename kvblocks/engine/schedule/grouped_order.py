"""Requests that share a prefix, one after another: each prefix is computed once and used up before it is evicted.

The next request is the one that has most tokens in common with the one admitted last. Seen as a tree of prompts that
is a walk in depth: what shares most goes first, then what shares a little less, and where nobody shares a block the
oldest begins another group. Unlike the longest cached prefix it needs no cache to begin with, and it keeps a batch
together whose members read the same blocks, which cascade attention makes use of.
"""

from collections.abc import Sequence as Items

from kvblocks.core.sequence import Sequence
from kvblocks.engine.schedule.lookups import Lookups
from kvblocks.engine.schedule.order import AgingOrder
from kvblocks.engine.schedule.request import Request


class GroupedOrder(AgingOrder):
    """Ranks candidates by the full blocks that they have in common with the request admitted last; ties by arrival.

    Cost: no lookup, but at most `num_candidates` comparisons of prompts for each candidate that is asked for. Keeps the
    sequence that was admitted last alive.
    """

    _last: Sequence | None = None
    _block_size = 1

    def start(self, candidates: Items[Request], lookups: Lookups) -> None:  # noqa: ARG002
        """Learn the block size. O(1)."""
        self._block_size = lookups.manager.block_size

    def choose(self, candidates: Items[Request]) -> Request:
        """Return the one that shares most with the last, the oldest of several. O(their tokens), by memcmp."""
        last = self._last
        if last is None or len(candidates) == 1:
            return candidates[0]
        return max(candidates, key=lambda request: num_common_blocks(last, request.sequence, self._block_size))

    def note_admitted(self, request: Request) -> None:
        """Go on from this one. O(1)."""
        self._last = request.sequence


def num_common_blocks(one: Sequence, other: Sequence, block_size: int) -> int:
    """Return how many first blocks two sequences could share by their tokens, salt and adapter.

    Keys of spans, such as images, are not compared: this ranks, it decides no hit. O(tokens), by bisection with memcmp.
    """
    if one.salt != other.salt or one.lora != other.lora:
        return 0
    low, high = 0, min(one.num_tokens, other.num_tokens) // block_size
    tokens, others, num_bytes = one.packed_tokens(), other.packed_tokens(), 4 * block_size
    while low < high:  # the first `low` blocks are equal, and block `high` isn't or is one too many
        middle = (low + high + 1) // 2
        part = slice(low * num_bytes, middle * num_bytes)
        if bytes(tokens[part]) == bytes(others[part]):
            low = middle
        else:
            high = middle - 1
    return low
