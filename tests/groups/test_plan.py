"""Plans: the numbers are checked by hand."""

from typing import Any

import pytest

from kvblocks import FullAttention, InvalidArgumentError, KVCacheManager, KVLayer, SlidingWindow, plan

GEMMA_KINDS = [FullAttention(16), SlidingWindow(16, 512)]
GEMMA_1B = [KVLayer(0 if (layer + 1) % 6 == 0 else 1, 1, 256) for layer in range(26)]
GIB = 2**30


def test_gemma_3_1b() -> None:
    found = plan(GEMMA_KINDS, GEMMA_1B, "bfloat16", GIB)
    # A layer's block: 16 tokens x K and V x 1 head x 256 x 2 bytes. Four full layers fit a group; 22 others need six.
    assert found.layer_bytes == (16 * 2 * 1 * 256 * 2,) * 7
    assert found.block_bytes == 4 * 16_384
    assert found.num_blocks == GIB // 65_536
    assert found.groups == (GEMMA_KINDS[0], *[GEMMA_KINDS[1]] * 6)
    assert found.group_layers[0] == (5, 11, 17, 23)
    assert sorted(layer for layers in found.group_layers for layer in layers) == list(range(26))
    assert found.padding == pytest.approx(2 / 28)
    assert found.num_slots == 4
    assert found.layer_groups[5] == (0, 0) and found.layer_groups[23] == (0, 3)
    for layer, (group, slot) in enumerate(found.layer_groups):
        assert found.group_layers[group][slot] == layer
    # 2048 blocks of the full group, and of each window 511 tokens and one, anywhere: at most 33 blocks.
    assert found.blocks_of_sequence(32_768) == (2048, *[33] * 6)
    assert found.num_sequences(32_768) == pytest.approx(16_384 / (2048 + 6 * 33))
    assert found.blocks_of_sequence(32_768, 2048) == (2048, *[161] * 6)
    assert KVCacheManager(found.num_blocks, groups=found.groups).groups == found.groups


def test_no_padding_means_more_groups() -> None:
    found = plan(GEMMA_KINDS, GEMMA_1B, 2, GIB, max_padding=0)
    assert (found.padding, len(found.groups), found.num_slots) == (0, 13, 2)


def test_padding_means_fewer_groups() -> None:
    found = plan(GEMMA_KINDS, GEMMA_1B, 2, GIB, max_padding=0.5)
    assert len(found.groups) == 2 and found.num_slots == 22
    assert found.padding == pytest.approx(1 - 26 / 44)


def test_one_kind_is_one_group() -> None:
    found = plan([FullAttention(16)], [KVLayer(0, 8, 128)] * 32, "float16", 10 * GIB)
    assert found.groups == (FullAttention(16),)
    assert found.block_bytes == 32 * 16 * 2 * 8 * 128 * 2
    assert (found.num_blocks, found.padding) == (10 * GIB // found.block_bytes, 0)


def test_shapes_that_differ_meet_by_their_block_sizes() -> None:
    kinds = [FullAttention(16), SlidingWindow(32, 128)]
    found = plan(kinds, [KVLayer(0, 4, 128), KVLayer(1, 2, 128)] * 4, "float8_e4m3fn", GIB)
    assert found.layer_bytes == (16_384, 16_384) and found.padding == 0
    assert found.block_bytes == 4 * 16_384


def test_shapes_that_differ_otherwise_are_padded() -> None:
    found = plan([FullAttention(16)], [KVLayer(0, 4, 128), KVLayer(0, 3, 128)], "float16", GIB)
    assert len(found.groups) == 2
    assert found.layer_bytes == (24_576, 32_768)
    assert found.block_bytes == 32_768
    assert found.padding == pytest.approx(1 - 7 / 8)


def test_the_table_says_what_the_fields_say() -> None:
    text = str(plan(GEMMA_KINDS, GEMMA_1B, "bfloat16", GIB))
    assert "16384 blocks of 65536 bytes: 1073741824 of 1073741824 bytes, 7.1% of a block is padding" in text
    assert "    0  full                      16       4          16384  5, 11, 17, 23" in text
    assert "window 512" in text
    assert f"{32_768:14}  {2048 + 6 * 33:17}  {16_384 / 2246:18.2f}" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": []}, "groups: expected FullAttention and SlidingWindow items"),
        ({"layers": []}, "layers: expected at least one"),
        ({"layers": [KVLayer(2, 1, 64)]}, "layers: kind: expected an int from 0 to 1, got 2"),
        ({"layers": [(0, 1)]}, "layers: expected KVLayer items"),
        ({"layers": 5}, "layers: expected KVLayer items, got 5"),
        ({"layers": [KVLayer(0, 0, 64)]}, "layers: num_kv_heads: expected an int of at least 1"),
        ({"layers": [KVLayer(0, 1, 0.5)]}, "layers: head_dim: expected an int of at least 1"),
        ({"dtype": "bf16"}, "dtype: expected bytes of an element or one of"),
        ({"dtype": 0}, "dtype: expected an int of at least 1"),
        ({"num_bytes": 0}, "num_bytes: expected an int of at least 1"),
        (
            {"num_bytes": 65_536 * 7 - 1},
            "num_bytes: expected at least 458752, a block for each of 7 groups, got 458751",
        ),
        ({"max_padding": 1.5}, "max_padding: expected a share from 0.0 to 1.0"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"kinds": GEMMA_KINDS, "layers": GEMMA_1B, "dtype": 2, "num_bytes": GIB, "max_padding": 0.1}
    given |= change
    with pytest.raises(InvalidArgumentError, match=message):
        plan(given["kinds"], given["layers"], given["dtype"], given["num_bytes"], max_padding=given["max_padding"])


def test_bad_lengths() -> None:
    found = plan(GEMMA_KINDS, GEMMA_1B, 2, GIB)
    with pytest.raises(InvalidArgumentError, match="num_tokens: expected an int of at least 1"):
        found.num_sequences(0)
    with pytest.raises(InvalidArgumentError, match="num_step_tokens: expected an int of at least 1"):
        found.blocks_of_sequence(10, 0)
