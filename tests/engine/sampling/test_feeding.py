"""Tokens of the step before take their places in the next one."""

import pytest
import torch

from kvblocks.engine.sampling.feeding import feed

DRAWN = torch.tensor([[50.0, 0, 1], [51.0, 0, 1], [52.0, 0, 1]], dtype=torch.float64)[:, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([-1, -2, -3], [50, 51, 52]),
        ([-1, -2], [50, 51]),
        ([-1], [50]),
        ([-3], [52]),
        ([-3, -1], [52, 50]),
        ([-2, 7, 0], [51, 7, 0]),
        ([7, 8, -2, 9, 10, 11], [7, 8, 51, 9, 10, 11]),
        ([7, 8], [7, 8]),
        ([-1, -2, -3, 4, 5], [50, 51, 52, 4, 5]),
    ],
)
def test_codes_become_the_tokens_that_were_drawn(dtype, codes, expected):
    padding = [0, 0]
    token_ids = torch.tensor(codes + padding, dtype=dtype)
    feed(token_ids, codes, DRAWN)
    assert token_ids.tolist() == expected + padding
    assert token_ids.dtype == dtype
