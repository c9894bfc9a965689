"""The record of one request in JSON, as far as its caller may see it."""

from kvblocks import Explanation, Removal
from kvblocks.server.access.callers import Caller
from kvblocks.server.arrivals import Arrival
from kvblocks.server.misses.comparison import Comparison
from kvblocks.server.misses.record import anthropics, cache_json, compared_json, openais
from kvblocks.server.wire import Json


def arrival_json(arrival: Arrival, compared: Comparison | None, block_size: int, caller: Caller) -> Json:
    """Return the record of a request: what was cached, where its prompt differs from another, and why it missed."""
    explanation = arrival.explanation
    values: Json = {
        "num_prompt_tokens": arrival.num_prompt_tokens,
        "num_cached_tokens": arrival.num_cached_tokens,
        "cause": None if explanation is None else _cause(explanation, caller),
        "text": None if explanation is None else _explain(explanation, caller),
    }
    if arrival.num_cached_when_admitted is not None:
        values["num_cached_tokens_when_admitted"] = arrival.num_cached_when_admitted
    with_key = None if compared is None else compared.key
    num_tokens = arrival.num_prompt_tokens
    return {
        **values,
        "compared": compared_json(compared, block_size),
        "cache": cache_json(explanation, arrival.around, sees_others=caller.sees_others),
        "diagnostics": anthropics(compared, with_key, num_tokens),
        "prompt_cache_diagnostics": openais(compared, with_key, num_tokens, block_size),
    }


# Which of these causes applies depends on what others have cached. So a caller who must not know that sees only one.
_NOT_CACHED = frozenset({"other keys", "partly equal", "never cached"})


def _cause(explanation: Explanation, caller: Caller) -> str:
    """Return the cause of a miss, as far as the caller may know it."""
    return explanation.cause if caller.sees_others or explanation.cause not in _NOT_CACHED else "never cached"


def _explain(explanation: Explanation, caller: Caller) -> str:
    """Return an explanation without other callers' salts, since a salt may be a secret."""
    cause, number = _cause(explanation, caller), explanation.num_cached_blocks
    found = f"{number} of {explanation.num_full_blocks} full blocks are cached"
    if cause == "other keys":
        return f"{found}; block {number} is cached with other keys, such as another cache_salt"
    if caller.sees_others:
        return str(explanation)
    stored = [f"tokens {part.first_token} to {part.end_token - 1} are on {part.tier!r}" for part in explanation.tiers]
    if explanation.behind_tiers is not None:
        lost = explanation.behind_tiers
        stored.append(f"block {lost.block} is in no tier: {_removed(lost.removal)}")
    why = "was never cached, as far as is remembered" if cause == "never cached" else f"isn't cached: {cause}"
    if explanation.removal is not None and cause == explanation.removal.cause:
        why = f"isn't cached: {_removed(explanation.removal)}"
    return "; ".join([found if cause == "no miss" else f"{found}; block {number} {why}", *stored])


def _removed(removal: Removal) -> str:
    is_from_tier = removal.tier is not None and removal.cause == "evicted"
    return f"{removal.cause} from {removal.tier!r}" if is_from_tier else removal.cause
