"""The search for what begins with the most of some tokens, against looking at everything."""

import random
from array import array

import pytest

from kvblocks.integrations.mlx_lm.shelf import Siblings, num_equal

IDS = [7, 7 + (1 << 8), 7 + (1 << 16), 8, -(2**59) - 7]  # ids that share their first bytes


def packed(tokens):
    return array("q", tokens).tobytes()


def shared(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("seed", range(20))
def test_siblings_agree_with_looking_at_all(seed):
    source = random.Random(seed)
    siblings, kept = Siblings(), {}
    for _ in range(200):
        tokens = tuple([source.choice(IDS) for _ in range(source.randrange(1, 6))])
        if tokens in kept and source.randrange(2):
            siblings.remove(packed(tokens))
            del kept[tokens]
        elif tokens not in kept:
            kept[tokens] = object()
            siblings.add(packed(tokens), kept[tokens])
        wanted = [source.choice(IDS) for _ in range(source.randrange(1, 6))]
        best = max([shared(tokens, wanted) for tokens in kept], default=0)
        among = [item for tokens, item in kept.items() if best and shared(tokens, wanted) == best]
        number, items = siblings.nearest(packed(wanted), 1000)
        assert number == best and len(items) == len(among) and all(item in among for item in items)
        few = siblings.nearest(packed(wanted), 2)
        assert few[0] == best and len(few[1]) == min(2, len(among)) and all(item in among for item in few[1])
        assert siblings.get(packed(wanted)) is kept.get(tuple(wanted))


def test_equal_bytes_are_counted():
    for length in range(20):
        one = bytes(range(length))
        for place in range(length):
            assert num_equal(one, one[:place] + b"\xff" + one[place + 1 :]) == place
            assert num_equal(one, one[:place]) == place
        assert num_equal(one, one + b"x") == length
