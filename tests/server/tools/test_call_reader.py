"""Calls read out of a text that comes in pieces: the same, however it is cut."""

import itertools
import random

import pytest

from kvblocks.server.tools.formats import FORMATS
from kvblocks.server.tools.reader import CallReader, name_stop

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the <tool hat"}}\n</tool_call>'
LLAMA = '{"name": "look", "parameters": {"at": "the <tool hat"}}'

# A format, an answer's text, what is said, and how many calls are in it.
ANSWERS = [
    ("hermes", "", "", 0),
    ("hermes", "Hello.", "Hello.", 0),
    ("hermes", CALL, "", 1),
    ("hermes", f"I look.\n{CALL}\n{CALL}", "I look.\n", 2),
    ("hermes", f"{CALL} That was it.", "", 1),  # as in vLLM, text behind calls isn't given
    ("hermes", CALL.removesuffix("</tool_call>"), "", 1),  # an answer may end without the mark
    ("hermes", "a < b, <tool> and <tool_call", "a < b, <tool> and <tool_call", 0),
    ("hermes", "<tool_call>{broken}</tool_call> so", "<tool_call>{broken}</tool_call> so", 0),
    ("hermes", f"<tool_call>{{</tool_call>{CALL}", "<tool_call>{</tool_call>", 1),
    ("hermes", f"{CALL}<tool_call>{{</tool_call>", "<tool_call>{</tool_call>", 1),
    ("llama3", f"{LLAMA}; {LLAMA}", "", 2),
    ("llama3", f"  {LLAMA}", "", 1),
    ("llama3", "{} is a set", "{} is a set", 0),
    ("llama3", f"Look: {LLAMA}", f"Look: {LLAMA}", 0),
    ("llama3", f"Look: <|python_tag|>{LLAMA}", "Look: ", 1),
    ("llama3", "   ", "   ", 0),
    ("mistral", 'Yes.[TOOL_CALLS][{"name": "look", "arguments": {}}]', "Yes.", 1),
    ("mistral-args", "[TOOL_CALLS]look[ARGS]{}[TOOL_CALLS]look[ARGS]{}", "", 2),
    ("granite", '<|tool_call|>[{"name": "look", "arguments": {}}]', "", 1),
    ("pythonic", "[look(at='hat'), look()]", "", 2),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", 0),
    ("gemma", "<start_function_call>call:look{}<end_function_call>", "", 1),
]


def read(name, pieces, **options):
    reader = CallReader(FORMATS[name], **options)
    found = [reader.feed(piece, is_last=index == len(pieces) - 1) for index, piece in enumerate(pieces)]
    return "".join(text for text, _ in found), [call for _, calls in found for call in calls]


@pytest.mark.parametrize(("name", "text", "said", "num_calls"), ANSWERS)
def test_calls_and_text_are_the_same_however_the_text_is_cut(name, text, said, num_calls):
    generator = random.Random(text)
    cuts = [[], range(1, len(text))]
    cuts += [sorted(generator.sample(range(1, len(text)), min(5, len(text) - 1))) for _ in range(20) if len(text) > 1]
    for cut in cuts:
        pieces = [text[start:end] for start, end in itertools.pairwise([0, *cut, len(text)])]
        found, calls = read(name, pieces)
        assert (found, len(calls)) == (said, num_calls), pieces
        assert {call.name for call in calls} <= {"look"}
        assert len({call.call_id for call in calls}) == num_calls


def test_text_is_given_as_soon_as_it_is_certain_and_a_call_when_it_is_whole():
    reader = CallReader(FORMATS["hermes"])
    assert reader.feed("Hel") == ("Hel", [])
    assert reader.feed("lo <") == ("lo ", [])
    assert reader.feed("b> ") == ("<b> ", [])
    assert reader.feed(CALL[:-1]) == ("", [])
    text, calls = reader.feed(CALL[-1])
    assert (text, [call.arguments for call in calls]) == ("", ['{"at": "the <tool hat"}'])
    assert reader.feed("", is_last=True) == ("", [])


def test_where_one_call_is_wanted_the_first_is_given():
    assert len(read("hermes", [f"{CALL}\n{CALL}"], is_one=True)[1]) == 1


def test_ids_have_the_length_that_a_template_wants():
    ids = {name: read(name, ['[TOOL_CALLS][{"name": "look"}]'])[1] for name in ("mistral", "mistral-args")}
    assert {len(calls[0].call_id) for calls in ids.values()} == {9}


def test_a_long_answer_that_never_ends_its_call_costs_its_length():
    """Each piece is looked at once, so that a hostile answer can't make the event loop slow."""
    reader = CallReader(FORMATS["hermes"])
    reader.feed("<tool_call>")
    for _ in range(20_000):
        assert reader.feed("<" * 5) == ("", [])
    assert reader._looked > 99_000  # noqa: SLF001  # where the next search begins
    text, calls = reader.feed("", is_last=True)
    assert (len(text), calls) == (11 + 100_000, [])


@pytest.mark.parametrize(
    ("text", "stops", "reason"),
    [
        (CALL, (), "tool_calls"),
        (f"I look.\n{CALL}", ("I feel.",), "tool_calls"),
        ("I don't look.", (), "stop"),
        ("", ("x",), "stop"),
        (CALL.replace("{", "("), (), "stop"),
        (f"Stop here. {CALL}", ("here", "Nowhere"), "stop"),  # the text ends before the call
    ],
)
def test_why_an_answer_stopped(text, stops, reason):
    assert name_stop(FORMATS["hermes"], text, stops) == reason
