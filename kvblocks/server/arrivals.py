"""What the cache had for a request when it arrived, how long the lookup took, and why it found no more.

The scheduler admits a request later, when the cache may hold more or less, but a client only knows when its request
arrived. Once a request is computed its own blocks are cached, so the reason for a miss must be found before that.
"""

import json
import time
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from kvblocks import Explanation, Removal
from kvblocks.engine.completion import Completion
from kvblocks.engine.schedule.lookups import Lookups
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.server.access.callers import Caller
from kvblocks.server.kept import BoundedStore
from kvblocks.server.misses.comparison import Comparison, compare
from kvblocks.server.misses.prompts import KeptMessage, KeptPrompt, KeptPrompts, KeptTool
from kvblocks.server.misses.reasons import NOTHING_KNOWN, Loss, Surroundings, TakenTimes
from kvblocks.server.requests import AnswerRequest
from kvblocks.server.tenant_usage import tenant_of

MAX_KEPT = 1000
MAX_BYTES = 8 * 2**20
"""The most bytes of the records of the last requests."""

_MAX_TAKERS = 4096
_MAX_TAKER_BYTES = 2 * 2**20


@dataclass(slots=True)
class Arrival:
    """One prompt as it arrived. explanation: None unless reasons are kept.

    around: the state of the cache at that time. key: the key of the kept prompt; None if it isn't kept for comparisons.
    num_cached_when_admitted: how many cached tokens its first sample found; None until that is done.
    """

    salt: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    explanation: Explanation | None
    around: Surroundings = NOTHING_KNOWN
    key: str | None = None
    num_cached_when_admitted: int | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A kept request: whose it is, and its prompts."""

    tenant: str | None
    prompts: list[Arrival]


@dataclass(frozen=True, slots=True)
class _Taker:
    """Whom a sequence was for."""

    tenant: str | None
    salt: str | None


class Arrivals:
    """The last MAX_KEPT requests by id, and counts of all lookups. Owned by the engine's thread.

    keep_reasons: whether to explain each miss on arrival, which costs O(runs in the cache + tokens) per prompt, and to
    keep prompts for comparisons. tokenizer: decodes what is compared. times: records when blocks were taken.
    """

    def __init__(self, lookups: Lookups, tokenizer: Tokenizer | None, *, keep_reasons: bool) -> None:
        self._lookups = lookups
        self._tokenizer = tokenizer
        self._keep_reasons = keep_reasons
        self._kept: BoundedStore[_Asked] = BoundedStore(MAX_KEPT, MAX_BYTES)
        self.prompts = KeptPrompts()
        self.times = TakenTimes()
        self._takers: BoundedStore[_Taker] = BoundedStore(_MAX_TAKERS, _MAX_TAKER_BYTES)  # by the sequence's id
        # One tuple, so that another thread reads two numbers of the same moment.
        self.num_lookups_and_seconds: tuple[int, float] = (0, 0.0)

    def note(self, key: str, asked: AnswerRequest, prompts: Items[Request]) -> None:
        """Look up a request's new prompts, each by its first sample. Call this before the next step."""
        arrivals = [self._look_up(request, asked.caller.tenant) for request in prompts]
        if self._keep_reasons and arrivals:
            self._keep(key, asked, prompts[0], arrivals[0])
        self._kept.keep(key, _Asked(asked.caller.tenant, arrivals))

    def finish(self, key: str, prompt: int, completion: Completion) -> None:
        """Note the completion of a prompt's first sample."""
        kept = self._kept.get(key)
        if kept is not None:
            kept.prompts[prompt].num_cached_when_admitted = completion.num_cached_tokens
        if not prompt:
            self.prompts.finish(key, completion.token_ids)

    def find(self, key: str, caller: Caller) -> list[Arrival] | None:
        """Return the arrivals of a request's prompts.

        None if the request is unknown or too old, or belongs to another tenant and the caller is no operator.
        """
        kept = self._kept.get(key)
        return kept.prompts if kept is not None and (kept.tenant == caller.tenant or caller.is_operator) else None

    def forget(self, salt: str | None) -> None:
        """Drop all that is kept of a salt's requests. O(requests)."""
        self._kept.forget(lambda one: any(prompt.salt == salt for prompt in one.prompts))
        self._takers.forget(lambda one: one.salt == salt)
        self.prompts.forget(salt)

    def find_last(self, caller: Caller, salt: str | None, session: str | None) -> str | None:
        """Return the id of a caller's last request under a salt, and in a session if one is named. O(requests)."""
        found = self.prompts.last(caller.tenant, salt, session)
        return None if found is None else found.key

    def compare(self, arrival: Arrival, with_key: str | None = None) -> Comparison | None:
        """Compare a prompt with the previous one in its conversation, or with that of another answer, by its id.

        None if there is no such prompt, or if it has another tenant or salt.
        """
        kept = self.prompts
        prompt = None if arrival.key is None else kept.get(arrival.key)
        if prompt is None:
            return None
        other = kept.before(prompt) if with_key is None else kept.find(with_key, prompt.tenant, prompt.salt)
        return None if other is None or other is prompt else compare(other, prompt, self._tokenizer)

    def _keep(self, key: str, asked: AnswerRequest, request: Request, arrival: Arrival) -> None:
        sequence = request.sequence
        tokens, tools = array("I", sequence.token_ids(0, sequence.num_prompt_tokens)), asked.tools
        messages = tuple([_kept_message(message) for message in asked.messages])
        fingerprints = () if tools is None else tuple([KeptTool(*pair) for pair in tools.fingerprints])
        session = asked.options.get("session")
        self.prompts.keep(KeptPrompt(key, asked.caller.tenant, sequence.salt, session, tokens, messages, fingerprints))
        arrival.key = key

    def _look_up(self, request: Request, tenant: str | None) -> Arrival:
        start = time.perf_counter()
        hit = self._lookups.find(request)
        seconds = time.perf_counter() - start
        count, total = self.num_lookups_and_seconds
        self.num_lookups_and_seconds = (count + 1, total + seconds)
        explanation, around = None, Surroundings()
        sequence = request.sequence
        if self._keep_reasons:
            explanation = self._lookups.manager.inspect.explain(sequence)
            if explanation.cause != "no miss":
                around = self.look_around(explanation, sequence.salt, tenant, hit.pending_tokens)
            self._takers.keep(sequence.sequence_id, _Taker(tenant, sequence.salt))
        return Arrival(sequence.salt, sequence.num_prompt_tokens, hit.num_tokens, explanation, around)

    def look_around(
        self, explanation: Explanation, salt: str | None, tenant: str | None, num_pending_tokens: int
    ) -> Surroundings:
        """Return the current state of the cache, as far as it can explain a miss of this salt and tenant.

        O(pins + quotas).
        """
        behind, manager = explanation.behind_tiers, self._lookups.manager
        if explanation.removal is None and behind is None:
            return Surroundings(num_pending_tokens=num_pending_tokens)
        used = [quota for quota in manager.quotas if quota.salt == salt]
        return Surroundings(
            num_pinned_blocks=sum([pin.num_held_blocks for pin in manager.pins]),
            is_over_quota=any(quota.num_cached_blocks >= quota.max_cached_blocks for quota in used),
            num_pending_tokens=num_pending_tokens,
            loss=self._loss(explanation.removal, salt, tenant),
            loss_behind_tiers=self._loss(None if behind is None else behind.removal, salt, tenant),
        )

    def _loss(self, removal: Removal | None, salt: str | None, tenant: str | None) -> Loss:
        """When a block of a prompt of this salt and tenant was removed, and for whom. O(moments)."""
        if removal is None:
            return Loss()
        at, taker = self.times.when(removal.num_taken_blocks), self._takers.get(removal.sequence_id)
        if removal.tier is not None and removal.cause == "evicted":
            return Loss(at, tenant_of(removal.salt) or None, removal.salt == salt)
        return Loss(at) if taker is None else Loss(at, taker.tenant, taker == _Taker(tenant, salt))


def _kept_message(message: Mapping[str, Any]) -> KeptMessage:
    more = {name: value for name, value in message.items() if name not in {"role", "content"}}
    return KeptMessage(message["role"], message["content"], json.dumps(more) if more else "")
