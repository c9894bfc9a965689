"""What the cache had for a request when it arrived: how long the lookup took, and why it found no more.

The scheduler admits a request later, when the cache may hold more or less. A client knows only when its request
arrived. Once a request is computed its own blocks are cached, so the reason for a miss must be found before.
"""

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass

from kvblocks.engine.completion import Completion
from kvblocks.engine.schedule.lookups import Lookups
from kvblocks.engine.schedule.request import Request
from kvblocks.observe.explanation import Explanation
from kvblocks.server.access.callers import Caller

MAX_KEPT = 1000


@dataclass(slots=True)
class Arrival:
    """One prompt when it came. explanation: None unless reasons are kept. completion: its first sample's, once done."""

    num_prompt_tokens: int
    num_cached_tokens: int
    explanation: Explanation | None
    completion: Completion | None = None


class Arrivals:
    """The last MAX_KEPT requests, by id, and counts of all lookups. Owned by the engine's thread.

    keep_reasons: explain each miss when it comes, which costs O(runs in the cache + tokens) a prompt.
    """

    def __init__(self, lookups: Lookups, *, keep_reasons: bool) -> None:
        self._lookups = lookups
        self._keep_reasons = keep_reasons
        self._kept: dict[str, tuple[str | None, list[Arrival]]] = {}
        # One tuple, so that another thread reads two numbers of the same moment.
        self.num_lookups_and_seconds: tuple[int, float] = (0, 0.0)

    def note(self, key: str, tenant: str | None, prompts: Items[Request]) -> None:
        """Look up a tenant's new prompts, each by its first sample. Call it before the next step."""
        self._kept[key] = (tenant, [self._look_up(request) for request in prompts])
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]

    def finish(self, key: str, prompt: int, completion: Completion) -> None:
        """Note the completion of a prompt's first sample."""
        if key in self._kept:
            self._kept[key][1][prompt].completion = completion

    def find(self, key: str, caller: Caller) -> list[Arrival] | None:
        """Return the arrivals of a request's prompts.

        None if the request is unknown or too old, or another tenant's and the caller is no operator.
        """
        tenant, arrivals = self._kept.get(key, (None, None))
        return arrivals if tenant == caller.tenant or caller.is_operator else None

    def _look_up(self, request: Request) -> Arrival:
        start = time.perf_counter()
        hit = self._lookups.find(request)
        seconds = time.perf_counter() - start
        count, total = self.num_lookups_and_seconds
        self.num_lookups_and_seconds = (count + 1, total + seconds)
        explanation = self._lookups.manager.inspect.explain(request.sequence) if self._keep_reasons else None
        return Arrival(request.sequence.num_prompt_tokens, hit.num_tokens, explanation)
