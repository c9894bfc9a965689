"""The orders of admission by name, for options and flags.

Both orders by prefix rank a limited number of candidates, and `AgingOrder` bounds how often a request is overtaken.
"""

from collections.abc import Sequence as Items

from kvblocks import Sequence
from kvblocks.engine.schedule.lookups import Lookups
from kvblocks.engine.schedule.order import AgingOrder, FirstCome, Order
from kvblocks.engine.schedule.request import Request
from kvblocks.errors import InvalidArgumentError


class LongestPrefixOrder(AgingOrder):
    """Longest cached prefix first, so that prefixes are used before they are evicted.

    Ranks candidates by how many of their tokens are cached when the step begins; ties by arrival. The idea is SGLang's
    cache-aware scheduling.

    Cost: at most `num_candidates` lookups a step, and none for a single candidate. Prefixes that requests of the same
    step will cache don't count: a request that shares one waits for it or hits it anyway.
    """

    _num_cached_tokens: dict[Request, int]

    def start(self, candidates: Items[Request], lookups: Lookups) -> None:
        """Look up the candidates. O(their tokens), by memcmp."""
        ranked = [request for request in candidates if not request.was_admitted]
        self._num_cached_tokens = {
            request: lookups.find(request).num_tokens if len(ranked) > 1 else 0 for request in ranked
        }

    def choose(self, candidates: Items[Request]) -> Request:
        """Return the candidate with the longest cached prefix; ties go to the oldest. O(candidates)."""
        return max(candidates, key=self._num_cached_tokens.__getitem__)


class GroupedOrder(AgingOrder):
    """Requests that share a prefix go one after another, so each prefix is computed once and used before it is evicted.

    The next request is the one that has the most full blocks in common with the last admitted one; ties by arrival. In
    the tree of prompts this is a depth-first walk. When no request shares a block, the oldest one begins another
    cohort. Unlike the order by longest cached prefix, this order also works with an empty cache. It brings requests
    that read the same blocks into one batch, which helps cascade attention.

    Cost: no lookup, but at most `num_candidates` comparisons of prompts for each candidate. Keeps a reference to the
    sequence of the last admitted request.
    """

    _last: Sequence | None = None
    _block_size = 1

    def start(self, candidates: Items[Request], lookups: Lookups) -> None:  # noqa: ARG002
        """Learn the block size. O(1)."""
        self._block_size = lookups.manager.block_size

    def choose(self, candidates: Items[Request]) -> Request:
        """Return the candidate that shares the most blocks with the last admitted one; ties go to the oldest.

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
    """Return how many leading blocks two sequences could share, by their tokens, salt and adapter.

    Extra keys, such as those of images, are not compared, since this is only for ranking. O(tokens), by bisection with
    memcmp.
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


SCHEDULES: dict[str, type[FirstCome | LongestPrefixOrder | GroupedOrder]] = {
    "fcfs": FirstCome,
    "longest-prefix": LongestPrefixOrder,
    "grouped": GroupedOrder,
}


def make_order(schedule: str) -> Order:
    """Return a new order of this name. Raises InvalidArgumentError."""
    if not isinstance(schedule, str) or schedule not in SCHEDULES:
        raise InvalidArgumentError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
    return SCHEDULES[schedule]()
