"""Stop strings: the text ends before the first one, however it is cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblocks.engine.options import GenerationOptions
from kvblocks.engine.text.stop_strings import StopMatcher
from kvblocks.errors import InvalidArgumentError


def feed(stops, pieces):
    """The matcher's text for each piece and at the end, and whether it stopped."""
    matcher = StopMatcher(stops)
    texts = [matcher.feed(piece) for piece in pieces]
    return [*texts, matcher.finish()], matcher.is_matched


@pytest.mark.parametrize(
    ("stops", "pieces", "texts", "stopped"),
    [
        ([], ["a", "b"], ["a", "b", ""], False),
        (["END"], ["one E", "N", "D two"], ["one ", "", "", ""], True),
        (["END"], ["one E", "Nd", " two"], ["one ", "ENd", " two", ""], False),
        (["END"], ["one EN"], ["one ", "EN"], False),
        (["END"], ["one END two", "three"], ["one ", "", ""], True),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", "", ""], True),
        (["b", "abc"], ["xa", "bc"], ["x", "a", ""], True),  # b ends first, so a is text
        (["bc", "abc"], ["xabc"], ["x", ""], True),  # both end there: the longer one
        (["aab"], ["aaa", "ab"], ["a", "a", ""], True),
        (["x"], ["x"], ["", ""], True),
    ],
)
def test_what_is_certain_comes_at_once(stops, pieces, texts, stopped):
    assert feed(stops, pieces) == (texts, stopped)


def before_first_stop(text, stops):
    """The expected result, found letter by letter."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


LETTERS = st.text("ab", max_size=6)


@given(pieces=st.lists(LETTERS, max_size=12), stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3))
def test_the_cuts_do_not_matter_and_nothing_is_taken_back(pieces, stops):
    expected, stopped = before_first_stop("".join(pieces), stops)
    matcher, out = StopMatcher(stops), ""
    for piece in pieces:
        out += matcher.feed(piece)
        assert expected.startswith(out)
        assert out == expected or not matcher.is_matched
    assert (out + matcher.finish(), matcher.is_matched) == (expected, stopped)


def test_no_stop_string_begins_in_exempt_pieces():
    matcher = StopMatcher(["ab", "bc"], 2)
    assert [matcher.feed(piece) for piece in ("ab", "xa", "bc")] == ["ab", "xa", ""]
    assert matcher.is_matched
    matcher = StopMatcher(["ab"], 1)
    assert [matcher.feed(piece) for piece in ("xa", "bx", "a")] == ["xa", "bx", ""]
    assert (matcher.finish(), matcher.is_matched) == ("a", False)


@given(text=LETTERS, stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3))
def test_as_much_as_can_be_is_shown(text, stops):
    """Text is held back only if further text could make it a stop string."""
    matcher = StopMatcher(stops)
    out = matcher.feed(text)
    held = text[len(out) :]
    if held and not matcher.is_matched:
        assert any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [3], None, 3, {"a"}])
def test_stops_must_be_texts(stop):
    with pytest.raises(InvalidArgumentError, match="stop: expected a non-empty str, or a list of them, got"):
        GenerationOptions(stop=stop)


@pytest.mark.parametrize(("stop", "stops"), [((), ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), (("a",), ("a",))])
def test_one_stop_or_several(stop, stops):
    assert GenerationOptions(stop=stop).stops == stops
