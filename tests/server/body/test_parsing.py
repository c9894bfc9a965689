"""What a JSON text may cost is known before it is parsed."""

import json

import pytest

from kvblocks.server.body import parsing
from kvblocks.server.body.parsing import MAX_ITEMS, decode_json, parse_json
from kvblocks.server.errors import ApiError


@pytest.fixture(autouse=True, params=[-1, 2**17], ids=["string by string", "all at once"])
def strict(monkeypatch, request):
    """Bounds that a short text exceeds."""
    monkeypatch.setattr(parsing, "_BOUNDS", ((":[{", 20, "names, arrays and objects"), (",", 30, "values")))
    monkeypatch.setattr(parsing, "_FEW_QUOTES", request.param)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps({str(index): 1 for index in range(20)}), "20 names, arrays and objects"),
        (json.dumps([[]] * 20), "20 names, arrays and objects"),
        (json.dumps([{}] * 20), "20 names, arrays and objects"),
        (json.dumps([1] * 32), "30 values"),
        (r'"\\"' + "[" * 21, "20 names, arrays and objects"),  # the string ends before them
        ("[" * 21 + '"', "20 names, arrays and objects"),
    ],
)
def test_a_text_with_too_much_is_refused_before_it_is_parsed(text, words, monkeypatch):
    monkeypatch.setattr(parsing.json, "loads", None)
    with pytest.raises(ApiError, match=f"at most {words}, got more") as raised:
        parse_json(text)
    assert (raised.value.status, raised.value.code) == (400, "too_many_values")


@pytest.mark.parametrize(
    "value",
    [
        "[{:," * 100,
        {"a": "[{:," * 100, "b": '"[{:,\\"' * 100, "\\": "[[\\\\" * 50},
        [[]] * 19,
        [1] * 31,
        {str(index): index for index in range(19)},
    ],
)
def test_what_stands_in_strings_does_not_count(value):
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("text", ['"' + '\\"' * 50_000, '"' * 99_999, "\\" * 100_000, '"a' * 50_000 + "\\"])
def test_looking_for_strings_takes_no_longer_for_odd_ones(text):
    with pytest.raises(
        ApiError, match="expected a JSON body"
    ):  # within the test's time: each character is looked at once
        parse_json(text + "," * 31)


def test_a_long_text_has_few_numbers_with_a_fraction():
    text = "[" + " " * parsing.SMALL_TEXT + "%s]"
    number = '{"a": ' + "1.5" + "}"
    assert parse_json(text % number) == [{"a": 1.5}]


def test_numbers_with_a_fraction_are_counted(monkeypatch):
    monkeypatch.setattr(parsing, "_BOUNDS", ())
    assert parse_json(f"[{'1.5,' * (MAX_ITEMS - 1)}2e3]")[-2:] == [1.5, 2000.0]
    with pytest.raises(ApiError, match="numbers with a fraction"):
        parse_json(f"[{'1.5,' * MAX_ITEMS}2e3]")


@pytest.mark.parametrize("body", [b"\xff", '{"a": 1}'.encode("utf-16"), b"{", b"[" * 19 + b"1"])
def test_other_bodies_are_refused(body):
    with pytest.raises(ApiError, match="expected a JSON body"):
        decode_json(body)


def test_a_body_may_begin_with_a_mark_of_utf_8():
    assert decode_json(b'\xef\xbb\xbf{"a": "\xc3\xa4"}') == {"a": "\u00e4"}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1.5e999"])
def test_numbers_that_no_answer_could_repeat_are_refused(number):
    with pytest.raises(ApiError, match="finite number") as raised:
        parse_json(f'{{"metadata": {{"a": {number}}}}}')
    assert raised.value.status == 400
