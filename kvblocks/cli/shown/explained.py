"""The lines of `kvblocks cache explain`: why a prompt missed, and where it diverges from the one before it."""

from collections.abc import Iterator
from typing import Any

from kvblocks.arguments import counted

_WORDS = {
    "pinned_out": "pins held many blocks, so it was evicted; without them it would still be cached",
    "over_quota": "its tenant was over its quota, so its blocks were evicted first",
    "never_written": "the step that was to compute it failed",
    "window_missing": "layers with a window lack tokens that a longer hit needs",
    "state_missing": "layers with a recurrent state have no checkpoint there",
}


def explain_lines(entry: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about one prompt, as the server's JSON describes it."""
    why = entry["text"] or "no reasons are kept, since the server runs with --num-history-blocks 0"
    yield f"{entry['num_cached_tokens']} of {counted(entry['num_prompt_tokens'], 'token')}: {why}"
    cache = entry.get("cache") or {}
    if cache.get("reason") in _WORDS:
        yield f"  reason: {_WORDS[cache['reason']]}"
    if cache.get("num_blocks_since") is not None:
        yield f"  {_lost(cache)}; still in: {', '.join(cache.get('still_in') or ()) or 'no tier'}"
    beyond = cache.get("behind_tiers")
    if beyond is not None:
        yield f"  block {beyond['block']} is in no tier: {_lost(beyond)}"
    if cache.get("num_pending_tokens"):
        yield f"  another request was about to compute {cache['num_pending_tokens']} more of these tokens"
    compared = entry.get("compared")
    if compared is None:
        return
    yield f"  compared with {compared['request_id']}: the first {compared['num_common_tokens']} tokens are equal"
    yield f"  {compared['text']}" + (f", in {compared['item']}" if compared["item"] else "")
    if compared["differs"] is not None:
        before, after = [_shown(compared[side]["text"]) for side in ("before", "after")]
        yield f"  first different token, after {compared['context']!r}: {before} before, {after} now"


def _shown(text: str | None) -> str:
    """A token's text; None: the prompt ends there."""
    return "the end" if text is None else repr(text)


def _lost(loss: dict[str, Any]) -> str:
    """When and where a block was lost, and for whom."""
    ago = "longer ago than is remembered" if loss["seconds_since"] is None else f"{loss['seconds_since']:.0f} s ago"
    whose = {"own": ", for a request of the same client", "another": ", for another client"}
    place = "" if loss.get("evicted_from") is None else f", evicted from {loss['evicted_from']}"
    return f"lost {ago}{place}{whose.get(loss.get('evicted_for') or '', '')}"
