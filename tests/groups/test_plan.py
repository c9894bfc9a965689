"""Plans: the numbers are checked by hand."""

from typing import Any

import pytest

from kvblocks import FullAttention, InvalidArgumentError, KVCacheManager, KVLayer, LatentLayer, SlidingWindow, plan

GEMMA_KINDS = [FullAttention(16), SlidingWindow(16, 512)]
GEMMA_1B = [KVLayer(0 if (layer + 1) % 6 == 0 else 1, 1, 256) for layer in range(26)]
GIB = 2**30


def test_gemma_3_1b() -> None:
    found = plan(GEMMA_KINDS, GEMMA_1B, "bfloat16", GIB)
    # A layer's block: 16 tokens x K and V x 1 head x 256 x 2 bytes. Four full layers fit a group; 22 others need six.
    assert [set(sizes) for sizes in found.layer_bytes] == [{16 * 2 * 1 * 256 * 2}] * 7
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
    assert found.layer_bytes == ((16_384,) * 4, (16_384,) * 4) and found.padding == 0
    assert found.block_bytes == 4 * 16_384


def test_shapes_that_differ_otherwise_are_padded() -> None:
    kinds = [FullAttention(16), SlidingWindow(16, 64)]
    found = plan(kinds, [KVLayer(0, 4, 128), KVLayer(1, 3, 128)], "float16", GIB)
    assert len(found.groups) == 2
    assert found.layer_bytes == ((32_768,), (24_576,))
    assert found.block_bytes == 32_768
    assert found.padding == pytest.approx(1 - 7 / 8)


def test_layers_of_a_kind_may_differ_in_a_group() -> None:
    found = plan([FullAttention(16)], [KVLayer(0, 4, 128), KVLayer(0, 3, 128)] * 2, "float16", GIB)
    assert (found.groups, found.padding) == ((FullAttention(16),), 0)
    assert found.layer_bytes == ((32_768, 24_576) * 2,)
    assert "24576-32768" in str(found)


def test_a_latent_and_its_indexer_lie_in_one_block() -> None:
    """As DeepSeek V3.2 keeps them: 576 elements of bfloat16 a token, and 132 bytes of the indexer."""
    latents = [LatentLayer(0, 576 * 2), LatentLayer(0, 132)] * 61
    found = plan([FullAttention(64)], latents, "float8_e4m3fn", 10 * GIB)  # the dtype says nothing of given bytes
    assert found.groups == (FullAttention(64),) and found.padding == 0
    assert found.layer_bytes == ((64 * 1152, 64 * 132) * 61,)
    assert found.block_bytes == 61 * 64 * (1152 + 132)
    assert found == plan([FullAttention(64)], latents, 4, 10 * GIB)


def test_a_latent_stays_with_its_indexer() -> None:
    """Layers beside others in windows: dealt over groups, each group has as many of each size."""
    layers = [LatentLayer(0, 96), LatentLayer(0, 32), LatentLayer(1, 128)] * 4
    found = plan([FullAttention(16), SlidingWindow(16, 64)], layers, 2, GIB)
    assert (len(found.groups), found.padding, found.block_bytes) == (2, 0, 4 * 16 * 128)
    assert found.group_layers == ((0, 1, 3, 4, 6, 7, 9, 10), (2, 5, 8, 11))
    uneven = plan(
        [FullAttention(16), SlidingWindow(16, 64)], [*layers, LatentLayer(1, 128), LatentLayer(1, 128)], 2, GIB
    )
    assert uneven.padding == 0 and len(uneven.groups) == 5
    assert uneven.group_layers[0] == (0, 1, 3, 4)


def test_the_table_says_what_the_fields_say() -> None:
    text = str(plan(GEMMA_KINDS, GEMMA_1B, "bfloat16", GIB))
    assert "16384 blocks of 65536 bytes: 1073741824 of 1073741824 bytes, 7.1% of a block is padding" in text
    assert "    0  full attention              16       4          16384  5, 11, 17, 23" in text
    assert "a window of 512" in text
    assert f"{32_768:14}  {2048 + 6 * 33:17}  {16_384 / 2246:18.2f}" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": []}, "groups: expected Group items"),
        ({"layers": []}, "layers: expected at least one"),
        ({"layers": [KVLayer(2, 1, 64)]}, "layers: kind: expected an int from 0 to 1, got 2"),
        ({"layers": [(0, 1)]}, "layers: expected KVLayer or LatentLayer items"),
        ({"layers": [LatentLayer(0, 0)]}, "layers: bytes_per_token: expected an int of at least 1, got 0"),
        ({"layers": [LatentLayer(2, 9)]}, "layers: kind: expected an int from 0 to 1, got 2"),
        ({"layers": 5}, "layers: expected KVLayer or LatentLayer items, got 5"),
        ({"layers": [KVLayer(0, 0, 64)]}, "layers: num_kv_heads: expected an int of at least 1"),
        ({"layers": [KVLayer(0, 1, 0.5)]}, "layers: head_dim: expected an int of at least 1"),
        ({"dtype": "bf16"}, "dtype: expected bytes of an element or one of"),
        ({"dtype": 0}, "dtype: expected an int of at least 1"),
        ({"num_bytes": 0}, "num_bytes: expected an int of at least 1"),
        (
            {"num_bytes": 65_536 * 7 - 1},
            "num_bytes: expected at least 458752, 7 blocks .one for each group., got 458751",
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
