"""Layers of several KV-cache groups over one pool: the same bits as when every layer keeps all its KV.

Group tables are made by hand here: blocks that have left the window are given to other sequences and hold NaN.
"""

import pytest
import torch
from engine.small_models import GEMMA3, WINDOW, prefill, random_tokens, random_weights, step

from kvblocks.engine.attention.batch import SequenceRows
from kvblocks.engine.model.layer_attention import LayerLocation
from kvblocks.engine.run.forward import DecoderModel
from kvblocks.engine.run.rows import TILE16
from kvblocks.errors import InvalidArgumentError

BLOCK_SIZE = 8
NUM_TOKENS = 7 * WINDOW
# Layers 0 and 1 have a window, 2 none, 3 one; a block has room for two layers.
LOCATIONS = (LayerLocation(0, 0), LayerLocation(0, 1), LayerLocation(1, 0), LayerLocation(2, 0))


@pytest.fixture(scope="module")
def weights():
    return random_weights(GEMMA3)


class Tables:
    """A sequence's tables in the three groups, and the pool that they come from."""

    def __init__(self, cache):
        self.cache = cache
        self.free = list(range(1, cache.num_blocks))  # block 0 is nobody's, and what dead entries name
        self.tables = [[], [], []]
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(torch.nan)

    def rows(self, token_ids, start):
        """Allocate blocks for a step. Blocks that none of its rows sees are given back, and spoiled."""
        for group, table in enumerate(self.tables):
            num_dead = max(0, start - WINDOW + 1) // BLOCK_SIZE if group != 1 else 0
            for index in range(num_dead):
                self.drop(table, index)
            while len(table) * BLOCK_SIZE < start + len(token_ids):
                table.append(self.free.pop(0))
        return SequenceRows(token_ids, start, self.tables[0], other_block_ids=self.tables[1:])

    def drop(self, table, index):
        if table[index] != 0:
            self.free.append(table[index])
            for tensor in (*self.cache.keys, *self.cache.values):
                tensor[table[index]] = torch.nan
            table[index] = 0


@pytest.mark.parametrize("chunk", [1, 10, 40, NUM_TOKENS])
def test_logits_are_those_of_one_group(weights, chunk):
    tokens = random_tokens(GEMMA3, NUM_TOKENS)
    single = DecoderModel(GEMMA3, weights, strategy=TILE16)
    expected = prefill(single, single.new_kv_cache(40, BLOCK_SIZE), tokens, range(40))
    model = DecoderModel(GEMMA3, weights, strategy=TILE16, layer_locations=LOCATIONS)
    # 24 blocks of the full layer, and of each other group the window, the chunk and what they begin and end in.
    num_blocks = 1 + 24 + 2 * ((WINDOW - 1 + chunk) // BLOCK_SIZE + 2)
    tables = Tables(model.new_kv_cache(num_blocks, BLOCK_SIZE))
    for start in range(0, NUM_TOKENS, chunk):
        logits = step(model, tables.cache, tables.rows(tokens[start : start + chunk], start))
    assert torch.equal(logits[0], expected)


def test_a_read_of_what_has_left_the_window_would_show(weights):
    """The test above can fail: with a window longer by one, a row sees a spoiled slot."""
    model = DecoderModel(GEMMA3, weights, strategy=TILE16, layer_locations=LOCATIONS)
    tables = Tables(model.new_kv_cache(80, BLOCK_SIZE))
    tokens = random_tokens(GEMMA3, NUM_TOKENS)
    step(model, tables.cache, tables.rows(tokens[:-1], 0))
    rows = tables.rows(tokens[-1:], NUM_TOKENS - 1)
    assert not step(model, tables.cache, rows).isnan().any()
    tables.drop(tables.tables[0], (NUM_TOKENS - WINDOW) // BLOCK_SIZE)
    assert step(model, tables.cache, rows).isnan().all()


def test_memory_is_that_of_the_largest_group(weights):
    grouped, single = DecoderModel(GEMMA3, weights, layer_locations=LOCATIONS), DecoderModel(GEMMA3, weights)
    cache, whole = grouped.new_kv_cache(10, 4), single.new_kv_cache(10, 4)
    assert cache.num_bytes * 2 == whole.num_bytes == 10 * 4 * GEMMA3.num_kv_heads * GEMMA3.head_dim * 4 * 2 * 4
    cache.keys[1][3] = 5.0
    cache.keys[3][3] = 7.0
    cache.copy_blocks([(3, 6)])
    assert [bool((cache.keys[layer][6] == value).all()) for layer, value in enumerate([7, 5, 7, 7])] == [True] * 4
    for block in range(3):
        cache.keys[3][block] = float(block)
    cache.copy_blocks([(0, 9), (1, 0), (2, 1), (9, 2)])  # a turn: three of it, as many as layers, would be none
    assert [float(cache.keys[3][block].mean()) for block in range(3)] == [1.0, 2.0, 0.0]


def test_every_group_needs_its_tables(weights):
    model = DecoderModel(GEMMA3, weights, layer_locations=LOCATIONS)
    cache = model.new_kv_cache(10, 4)
    with pytest.raises(InvalidArgumentError, match="expected block tables of 3 groups, got 1"):
        step(model, cache, SequenceRows([1], 0, [0]))
    with pytest.raises(InvalidArgumentError, match="block ids from 0 to 9, got 10"):
        step(model, cache, SequenceRows([1], 0, [0], other_block_ids=[[1], [10]]))
