"""One record per request: what it was compared with, where they differ, and why it missed, in several formats.

`diagnostics` is Anthropic's and `prompt_cache_diagnostics` is OpenAI's; both only compare requests. `cache` is ours.
"""

import time
from typing import Any

from kvblocks import Explanation, Removal
from kvblocks.server.misses.comparison import Comparison
from kvblocks.server.misses.reasons import Loss, Surroundings, reason_of

Json = dict[str, Any]

_ANTHROPICS = {"tools": "tools_changed", "system": "system_changed", "settings": "unavailable"}
_OPENAIS = {"tools": "tools_changed"}
_GOES_ON = frozenset({None, "answer"})
"""Values of `Comparison.part` in which the two services see no difference, since they don't know answers' tokens."""


def compared_json(found: Comparison | None, block_size: int) -> Json | None:
    """Return where two prompts begin to differ; None if there was nothing to compare with."""
    if found is None:
        return None
    return {
        "request_id": found.key,
        "num_common_tokens": found.num_common,
        "num_reusable_tokens": found.num_common // block_size * block_size,
        "differs": found.part,
        "item": found.item,
        "text": found.words,
        "before": {"token": found.before.token_id, "text": found.before.text},
        "after": {"token": found.after.token_id, "text": found.after.text},
        "context": found.context,
    }


def cache_json(explanation: Explanation | None, around: Surroundings, *, sees_others: bool) -> Json | None:
    """Return what the cache knows of a miss; None if no reasons are kept. sees_others: as in `reason_of`."""
    if explanation is None:
        return None
    found: Json = {
        "reason": reason_of(explanation, around, sees_others=sees_others),
        "num_cached_blocks": explanation.num_cached_blocks,
        "num_full_blocks": explanation.num_full_blocks,
        "num_pending_tokens": around.num_pending_tokens,
    }
    if explanation.removal is not None:
        found |= _loss_json(explanation.removal, explanation.num_blocks_since, around.loss, sees_others=sees_others)
        if explanation.removal.cause == "evicted":
            found["still_in"] = [part.tier for part in explanation.tiers]
            found["num_pinned_blocks"] = around.num_pinned_blocks if sees_others else None
    if explanation.kind is not None:
        found["kind"] = explanation.kind
    if explanation.missing_tokens is not None:
        found["missing_tokens"] = list(explanation.missing_tokens)
    behind = explanation.behind_tiers
    if behind is not None:
        loss = _loss_json(behind.removal, behind.num_blocks_since, around.loss_behind_tiers, sees_others=sees_others)
        found["behind_tiers"] = {"block": behind.block, **loss}
    return found


def _loss_json(removal: Removal, num_blocks_since: int, loss: Loss, *, sees_others: bool) -> Json:
    """What became of a block, when, and if it was evicted, where and for whom."""
    found: Json = {
        "removed": removal.cause,
        "num_blocks_since": num_blocks_since,
        "seconds_since": None if loss.at is None else round(max(0.0, time.time() - loss.at), 1),
    }
    if removal.cause == "evicted":
        whose = "own" if loss.is_own else "another"
        found["evicted_from"] = removal.tier or "device"
        found["evicted_for"] = None if loss.is_own is None else loss.tenant if sees_others else whose
    return found


def anthropics(found: Comparison | None, asked: str | None, num_tokens: int) -> Json | None:
    """Return `diagnostics`, as in Anthropic's Messages. asked: the id of the answer to compare with."""
    if asked is None or (found is not None and found.part in _GOES_ON):
        return None
    if found is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    kind = _ANTHROPICS.get(str(found.part), "messages_changed")
    missed = max(0, min(found.num_before, num_tokens) - found.num_common)
    told = {} if kind == "unavailable" else {"cache_missed_input_tokens": missed}
    return {"cache_miss_reason": {"type": kind, **told}}


def openais(found: Comparison | None, asked: str | None, num_tokens: int, block_size: int) -> Json | None:
    """Return `prompt_cache_diagnostics`, as in OpenAI's Responses. asked: the id of the answer to compare with."""
    if asked is None:
        return None
    if found is None:
        return {"type": "comparison_response_not_found"}
    if found.part in _GOES_ON:
        return {"type": "cache_hit"}
    return {
        "type": "cache_miss",
        "reason": _OPENAIS.get(str(found.part), "input_changed"),
        "cache_missed_tokens": max(0, num_tokens - found.num_common),
        "comparison_reusable_tokens": found.num_common // block_size * block_size,
    }
