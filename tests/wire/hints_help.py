"""Envelopes of hints, and the answers to them, for tests."""

from typing import Any

from model.tiered import make_manager, run, settle, spill

from kvblocks import KVCacheManager, Sequence
from kvblocks.wire.hints import HintExecutor, HintLimits

PROMPT = list(range(40))  # ten blocks of four tokens

__all__ = ["PROMPT", "action", "envelope", "holds", "make", "make_manager", "run", "say", "settle", "spill"]


def make(manager: KVCacheManager | None = None, max_pinned_blocks: int = 12, **limits: Any) -> HintExecutor:
    return HintExecutor(
        make_manager(64) if manager is None else manager,
        max_pinned_blocks=max_pinned_blocks,
        limits=HintLimits(**limits),
    )


def action(kind: str, payload: Any, action_id: str = "a") -> dict[str, Any]:
    return {"action_id": action_id, "action_type": kind, "action_version": "1.0", "payload": payload}


def envelope(*actions: Any, message_id: str = "m") -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": message_id, "actions": list(actions)}


_NUMBERS = iter(range(10**9))


def say(executor: HintExecutor, kind: str, *, tenant: str | None = None, now: float = 0.0, **payload: Any) -> Any:
    """Send one action with new ids, and return its answer."""
    sent = envelope(action(kind, payload), message_id=f"{next(_NUMBERS)}")
    (answer,) = executor.carry_out(sent, tenant, now).to_dict()["actions"]
    return answer["payload"]


def holds(manager: KVCacheManager, tokens: Any, **keys: Any) -> int:
    """How many tokens of a prefix are cached on the device."""
    return manager.get_computed_blocks(Sequence("probe", [*tokens, 77], **keys)).num_tokens
