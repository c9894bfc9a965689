"""What hints can cost at most: time on the engine's thread, memory, and errors."""

from typing import Any

import pytest
from wire.hints_help import PROMPT, make, make_manager, run, say


@pytest.mark.parametrize(
    ("max_tokens", "spans", "outcome"),
    [
        (40 + 40, [[0, 40, "a"]], "accepted"),
        (40 + 39, [[0, 40, "a"]], "rejected"),
        (40 + 40 + 8, [[0, 40, "a"], [3, 5, "b"]], "accepted"),  # two tokens of two blocks
        (40 + 40 + 7, [[0, 40, "a"], [3, 5, "b"]], "rejected"),
        (40 + 8, [[0, 1, "k" * 256]], "accepted"),  # a long key is written to each block, too
        (40 + 7, [[0, 1, "k" * 256]], "rejected"),
        (40 + 4, [[0, 1, "k" * 255]], "accepted"),
    ],
)
@pytest.mark.parametrize("kind", ["pin", "prefetch"])
def test_spans_count_the_blocks_that_they_touch(kind: str, max_tokens: int, spans: Any, outcome: str) -> None:
    manager = make_manager(64)
    run(manager, extra_keys=[tuple(span) for span in spans])
    answer = say(make(manager, max_tokens=max_tokens), kind, token_ids=PROMPT, extra_keys=spans)
    assert answer["outcome"] == outcome, answer
    if outcome == "rejected":
        assert "extra_keys: expected spans whose blocks have at most" in answer["reason"]


def test_prefixes_are_told_apart_by_the_spans_of_their_full_blocks() -> None:
    executor = make(max_pinned_blocks=64)
    long = [*PROMPT, 1, 2]
    assert say(executor, "pin", token_ids=long, extra_keys=[[30, 34, "b"], [2, 3, "a"], [40, 42, "tail"]])["pin_id"]
    for other in ([[2, 3, "a"]], [[2, 3, "a"], [30, 33, "b"]], [[2, 3, b"a"], [30, 34, "b"]]):
        assert say(executor, "release", token_ids=PROMPT, extra_keys=other)["outcome"] == "missing"
    same = say(executor, "release", token_ids=PROMPT, extra_keys=[[2, 3, "a"], [30, 34, "b"]])
    assert (same["outcome"], same["num_pins"]) == ("accepted", 1)
