"""The envelope of KV hints, received and sent. No input or output: plain values, as JSON or MessagePack give them.

    {"protocol_version": "0.1", "message_id": "...", "actions": [
        {"action_id": "...", "action_type": "pin", "action_version": "1.0", "payload": {...}}]}

The fields and their types are those of `KvHintsEnvelope` and `KvHintAction` in vLLM 0.33
(`vllm/v1/kv_hints/protocol.py`, `rust/proto/inference.proto`; vllm-project/vllm#53421 and #53423) and of `KvHint` in
Dynamo (ai-dynamo/dynamo#13134). Further fields are ignored, as msgspec and serde do there. Whoever carries out an
action defines its payload. The projects have agreed on one payload only, that of `kv.fetch` (fetching from other
workers), which kvblocks doesn't carry out.

The outcomes are those that vllm-project/vllm#51428 names. The projects have agreed on no form of an answer. Here an
answer is such an envelope too, with the outcomes as payloads. So the transport of hints also carries answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvblocks.arguments import is_a, plain_text, shown, wrong
from kvblocks.errors import InvalidArgumentError

PROTOCOL_VERSION = "0.1"
"""The version of the envelope that is read and sent."""

ACTION_VERSION = "1.0"
"""The version of the payloads that is read."""

MAX_ID_CHARACTERS = 256
"""The longest message_id or action_id."""

Outcome = Literal["accepted", "clipped", "deferred", "rejected", "missing"]


@dataclass(frozen=True, slots=True)
class HintAction:
    """One action of an envelope. problem: why it can't be read; its unreadable fields are then empty. None: it can."""

    action_id: str
    action_type: str
    action_version: str
    payload: Mapping[str, Any]
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the action as plain values, for sending."""
        return {
            "action_id": self.action_id,
            "action_type": self.action_type,
            "action_version": self.action_version,
            "payload": dict(self.payload),
        }


@dataclass(frozen=True, slots=True)
class HintsEnvelope:
    """Actions that were sent together."""

    message_id: str
    actions: tuple[HintAction, ...]
    protocol_version: str = PROTOCOL_VERSION

    def to_dict(self) -> dict[str, Any]:
        """Return the envelope as plain values, for sending."""
        return {
            "protocol_version": self.protocol_version,
            "message_id": self.message_id,
            "actions": [action.to_dict() for action in self.actions],
        }


@dataclass(frozen=True, slots=True)
class HintAnswer:
    """What became of an action.

    outcome is one of:

    - accepted: done in full.
    - clipped: done in part, see numbers.
    - deferred: not done yet; another answer will come.
    - rejected: not done.
    - missing: what the action names is not known here.

    reason: in words; None if accepted. numbers: what was done, such as num_blocks, and the pin's id.
    """

    action: HintAction
    outcome: Outcome
    reason: str | None = None
    numbers: Mapping[str, int | float | str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as an action whose payload is the outcome."""
        payload = {"outcome": self.outcome, "reason": self.reason, **self.numbers}
        action = self.action
        return HintAction(action.action_id, action.action_type, action.action_version, payload).to_dict()


@dataclass(frozen=True, slots=True)
class HintAnswers:
    """The answers to one envelope, in the order of its actions, for the tenant that sent it."""

    tenant: str | None
    message_id: str
    answers: tuple[HintAnswer, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the answers as an envelope of plain values, for sending. The tenant isn't in it."""
        actions = [answer.to_dict() for answer in self.answers]
        return {"protocol_version": PROTOCOL_VERSION, "message_id": self.message_id, "actions": actions}


def parse_envelope(value: object, max_actions: int) -> HintsEnvelope:
    """Return the envelope in plain values. A malformed action is returned with its `problem`.

    Raises InvalidArgumentError for values that are no envelope, for another protocol version, and for more than
    `max_actions` actions. O(actions).
    """
    fields = _mapping(value)
    if fields is None:
        raise wrong("envelope", "an object with protocol_version, message_id and actions", value)
    version = fields.get("protocol_version")
    if version != PROTOCOL_VERSION:
        raise wrong("envelope: protocol_version", repr(PROTOCOL_VERSION), version)
    message_id, actions = _text_of(fields.get("message_id")), fields.get("actions")
    if message_id is None:
        raise wrong("envelope: message_id", f"a text of 1 to {MAX_ID_CHARACTERS} characters", fields.get("message_id"))
    if not is_a(actions, list) and not is_a(actions, tuple):
        raise wrong("envelope: actions", "a list", actions)
    given: list[Any] = [*actions]  # type: ignore[misc]  # checked above
    if len(given) > max_actions:
        raise InvalidArgumentError(f"envelope: actions: expected at most {max_actions}, got {len(given)}")
    return HintsEnvelope(message_id, tuple([_parse_action(action) for action in given]))


def _parse_action(value: object) -> HintAction:
    fields = _mapping(value)
    if fields is None:
        return HintAction("", "", "", {}, f"expected an object, got {shown(value)}")
    action_id, payload = _text_of(fields.get("action_id")), _mapping(fields.get("payload"))
    kind, version = _text_of(fields.get("action_type")), _text_of(fields.get("action_version"))
    problem = None
    if action_id is None:
        got = shown(fields.get("action_id"))
        problem = f"action_id: expected a text of 1 to {MAX_ID_CHARACTERS} characters, got {got}"
    elif kind is None:
        problem = f"action_type: expected a text, got {shown(fields.get('action_type'))}"
    elif version is None:
        problem = f"action_version: expected a text, got {shown(fields.get('action_version'))}"
    elif payload is None:
        problem = f"payload: expected an object, got {shown(fields.get('payload'))}"
    return HintAction(action_id or "", kind or "", version or "", payload or {}, problem)


def _mapping(value: object) -> dict[str, Any] | None:
    """Return an object's fields; None if the value isn't an object."""
    given: Any = value
    if not is_a(given, dict) or not all(type(name) is str for name in given):
        return None
    return dict(given)


def _text_of(value: object) -> str | None:
    """Return a short text that can be sent; None for any other value."""
    given: Any = value
    text = plain_text(given) if is_a(given, str) else ""
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    return text if 0 < len(text) <= MAX_ID_CHARACTERS else None
