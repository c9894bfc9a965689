"""The envelope of hints: what is read, what is ignored, what is refused, and what is answered."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblocks import InvalidArgumentError
from kvblocks.wire.hints.envelope import HintAction, HintAnswer, HintAnswers, HintsEnvelope, parse_envelope

# As msgspec.json.encode gives vLLM 0.33's KvHintsEnvelope of tests/v1/test_request.py.
VLLM_JSON = (
    '{"protocol_version":"0.1","message_id":"msg-1","actions":[{"action_id":"action-1","action_type":"example.action",'
    '"action_version":"1.0","payload":{}}]}'
)


def test_vllms_envelope_comes_in_and_goes_out() -> None:
    parsed = parse_envelope(json.loads(VLLM_JSON), 1)
    assert parsed == HintsEnvelope("msg-1", (HintAction("action-1", "example.action", "1.0", {}),))
    assert json.dumps(parsed.to_dict(), separators=(",", ":")) == VLLM_JSON


def test_further_fields_are_ignored() -> None:
    value = json.loads(VLLM_JSON)
    value["trace_id"] = 7
    value["actions"][0]["deadline"] = None
    assert parse_envelope(value, 1).to_dict() == json.loads(VLLM_JSON)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (None, "envelope: expected an object with protocol_version, message_id and actions, got None"),
        ([], "envelope: expected an object"),
        ({1: 2}, "envelope: expected an object"),
        ({"protocol_version": "0.2"}, "protocol_version: expected '0.1', got '0.2'"),
        ({"protocol_version": 0.1}, "protocol_version: expected '0.1', got 0.1"),
        ({"message_id": ""}, "message_id: expected a text of 1 to 256 characters, got ''"),
        ({"message_id": "m" * 257}, "message_id: expected a text of 1 to 256 characters"),
        ({"message_id": "\ud800"}, "message_id: expected a text"),
        ({"message_id": None}, "message_id: expected a text of 1 to 256 characters, got None"),
        ({"actions": None}, "actions: expected a list, got None"),
        ({"actions": {}}, "actions: expected a list"),
        ({"actions": "ab"}, "actions: expected a list, got 'ab'"),
        ({"actions": [{}] * 3}, "actions: expected at most 2, got 3"),
    ],
)
def test_what_is_no_envelope_is_one_error(changes: Any, expected: str) -> None:
    value = {**json.loads(VLLM_JSON), **changes} if isinstance(changes, dict) and changes.keys() != {1} else changes
    with pytest.raises(InvalidArgumentError) as caught:
        parse_envelope(value, 2)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "expected an object, got None"),
        ({"action_id": 3}, "action_id: expected a text of 1 to 256 characters, got 3"),
        ({"action_id": ""}, "action_id: expected a text"),
        ({"action_type": None}, "action_type: expected a text, got None"),
        ({"action_version": 1.0}, "action_version: expected a text, got 1.0"),
        ({"payload": None}, "payload: expected an object, got None"),
        ({"payload": [1]}, "payload: expected an object, got [1]"),
        ({"payload": {2: 1}}, "payload: expected an object"),
    ],
)
def test_a_malformed_action_says_so_itself(value: Any, problem: str) -> None:
    good = json.loads(VLLM_JSON)["actions"][0]
    bad = {**good, **value} if isinstance(value, dict) else value
    parsed = parse_envelope({**json.loads(VLLM_JSON), "actions": [bad, good]}, 2)
    assert problem in (parsed.actions[0].problem or "")
    assert parsed.actions[1].problem is None


def test_answers_are_an_envelope_too() -> None:
    action = HintAction("a", "pin", "1.0", {})
    sent = HintAnswers("tenant", "m", (HintAnswer(action, "clipped", "why", {"num_blocks": 3}),)).to_dict()
    payload = {"outcome": "clipped", "reason": "why", "num_blocks": 3}
    assert parse_envelope(json.loads(json.dumps(sent)), 1) == HintsEnvelope(
        "m", (HintAction("a", "pin", "1.0", payload),)
    )
    assert "tenant" not in json.dumps(sent)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=16) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["protocol_version", "message_id", "actions", "x"]), PLAIN), PLAIN)
def test_any_plain_values_are_read_or_refused(fields: dict[str, Any], action: Any) -> None:
    for value in (fields, {**json.loads(VLLM_JSON), "actions": [action]}):
        try:
            parsed = parse_envelope(value, 3)
        except InvalidArgumentError:
            continue
        assert parse_envelope(parsed.to_dict(), 3).to_dict() == parsed.to_dict()
