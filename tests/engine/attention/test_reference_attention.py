"""The attention and the stores in plain torch, compared with dense attention in float64.

The engine computes with them on a CPU, and other tests compare the kernels with them. So a fault here would hide
others.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks.kernels.reference import copy_blocks, paged_attention, store, tiled_paged_attention

KINDS = pytest.mark.parametrize("attention", [paged_attention, tiled_paged_attention])
# float32 sums of at most some hundred terms of order 1, compared with float64: rounding stays below 1e-5.
CLOSE = {"rtol": 0, "atol": 1e-5}

# What a row sees: the parameter that says it, and its value.
ALL = ("all", 1)
SEES = [ALL, *(("window", size) for size in (1, 7, 16, 40)), *(("chunk_size", size) for size in (1, 7, 16, 40))]


class Case:
    """A ragged batch whose context lies in scattered blocks of caches that hold NaN everywhere else.

    Slots that no row sees are NaN too, and table entries wholly before what rows see name a block of NaN. sees: one of
    SEES.
    """

    def __init__(self, lengths, *, heads=(4, 2), head_dim=8, block_size=4, seed=0, sees=ALL, softcap=None):
        """lengths: (rows of this step, tokens in context) of each sequence."""
        self.sees, self.softcap = sees, softcap
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        num_blocks = [-(-context // block_size) for _, context in lengths]
        free = torch.randperm(sum(num_blocks) + 2, generator=generator, dtype=torch.int32).tolist()
        shape = (len(free), block_size, num_kv_heads, head_dim)
        self.key_cache, self.value_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        # Entries after a sequence's last block name a block of NaN.
        poisoned = free.pop()
        self.block_tables = torch.full((len(lengths), max([1, *num_blocks])), poisoned, dtype=torch.int32)
        self.keys, self.values = [], []
        for index, (_, context) in enumerate(lengths):
            blocks = [free.pop() for _ in range(num_blocks[index])]
            self.block_tables[index, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            key, value = (torch.randn(context, num_kv_heads, head_dim, generator=generator) for _ in range(2))
            slots = torch.tensor([blocks[i // block_size] * block_size + i % block_size for i in range(context)]).long()
            store(key, value, self.key_cache, self.value_cache, slots)
            self.keys.append(key)
            self.values.append(value)
            first_seen = self.first_seen(context - lengths[index][0])
            for cache in (self.key_cache, self.value_cache):
                cache.flatten(0, 1)[slots[:first_seen]] = torch.nan
            self.block_tables[index, : first_seen // block_size] = poisoned
        self.num_rows = [rows for rows, _ in lengths]
        self.query_start = torch.tensor([0, *self.num_rows]).cumsum(0).int()
        self.seq_lens = torch.tensor([context for _, context in lengths], dtype=torch.int32)
        self.query = torch.randn(sum(self.num_rows), num_heads, head_dim, generator=generator)
        self.scale = head_dim**-0.5

    def first_seen(self, position):
        how, size = self.sees
        return {"all": 0, "window": max(0, position - size + 1), "chunk_size": position - position % size}[how]

    @property
    def options(self):
        how, size = self.sees
        return {"scale": self.scale, "softcap": self.softcap} | ({} if how == "all" else {how: size})

    def run(self, attention):
        tables = (self.block_tables, self.query_start, self.seq_lens)
        return attention(self.query, self.key_cache, self.value_cache, *tables, **self.options)

    def expected(self):
        """Dense attention in float64, one query and one head at a time."""
        rows = []
        for index, key in enumerate(self.keys):
            first = int(self.query_start[index])
            group = self.query.shape[1] // key.shape[1]
            for i in range(self.num_rows[index]):
                end = len(key) - self.num_rows[index] + i + 1
                visible = slice(self.first_seen(end - 1), end)
                heads = []
                for head, query in enumerate(self.query[first + i].double()):
                    scores = key[visible, head // group].double() @ query * self.scale
                    if self.softcap:
                        scores = self.softcap * torch.tanh(scores / self.softcap)
                    heads.append(scores.softmax(0) @ self.values[index][visible, head // group].double())
                rows.append(torch.stack(heads))
        return torch.stack(rows).float() if rows else torch.empty(self.query.shape)


@KINDS
@pytest.mark.parametrize("sees", SEES, ids=str)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([(1, 1)], id="first token"),
        pytest.param([(37, 37)], id="prefill"),
        pytest.param([(5, 21)], id="chunk"),
        pytest.param([(300, 333)], id="chunk longer than a slice"),
        pytest.param([(1, 9), (1, 200), (1, 10), (1, 64)], id="decodes of unlike lengths"),
        pytest.param([(20, 20), (1, 33), (7, 50), (1, 16), (16, 32)], id="ragged"),
        pytest.param([(0, 5), (3, 3), (0, 0), (1, 8), (0, 17)], id="sequences without rows"),
        pytest.param([(0, 4), (0, 0)], id="no rows at all"),
    ],
)
def test_equals_dense_attention(attention, lengths, softcap, sees):
    case = Case(lengths, sees=sees, softcap=softcap)
    torch.testing.assert_close(case.run(attention), case.expected(), **CLOSE)


@KINDS
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_heads_in_groups_and_block_sizes(attention, heads, block_size):
    case = Case([(18, 40), (1, 7), (1, 31), (4, 4)], heads=heads, head_dim=6, block_size=block_size)
    torch.testing.assert_close(case.run(attention), case.expected(), **CLOSE)


@st.composite
def ragged_lengths(draw):
    rows = draw(st.lists(st.sampled_from([0, 1, 1, 2, 5, 16, 17, 40]), min_size=1, max_size=6))
    return [(num_rows, num_rows + draw(st.integers(0, 40))) for num_rows in rows]


@KINDS
@settings(max_examples=40)
@given(
    lengths=ragged_lengths(),
    block_size=st.integers(1, 20),
    seed=st.integers(0, 99),
    sees=st.just(ALL) | st.tuples(st.sampled_from(["window", "chunk_size"]), st.integers(1, 50)),
    softcap=st.sampled_from([None, 0.8]),
)
def test_equals_dense_attention_in_random_cases(attention, lengths, block_size, seed, sees, softcap):
    options = {"sees": sees, "softcap": softcap}
    case = Case(lengths, heads=(6, 3), head_dim=4, block_size=block_size, seed=seed, **options)
    torch.testing.assert_close(case.run(attention), case.expected(), **CLOSE)


@settings(max_examples=40)
@given(
    lengths=ragged_lengths(),
    seed=st.integers(0, 99),
    sees=st.just(ALL) | st.tuples(st.sampled_from(["window", "chunk_size"]), st.integers(1, 50)),
    softcap=st.sampled_from([None, 0.8]),
)
def test_a_tiled_row_has_the_same_bits_alone_and_in_any_chunk(lengths, seed, sees, softcap):
    case = Case(lengths, heads=(6, 2), head_dim=10, seed=seed, sees=sees, softcap=softcap)
    together = case.run(tiled_paged_attention)
    for index, (num_rows, context) in enumerate(lengths):
        for row in range(num_rows):
            at = int(case.query_start[index]) + row
            seq_len = context - num_rows + row + 1
            # Alone, as a decode: later tokens of the sequence are not there yet.
            alone = tiled_paged_attention(
                case.query[at : at + 1],
                case.key_cache,
                case.value_cache,
                case.block_tables[index : index + 1],
                torch.tensor([0, 1], dtype=torch.int32),
                torch.tensor([seq_len], dtype=torch.int32),
                **case.options,
            )
            assert torch.equal(alone[0], together[at])


@KINDS
def test_attention_reads_and_never_writes(attention):
    case = Case([(5, 9), (1, 20)])
    inputs = [case.query, case.key_cache, case.value_cache, case.block_tables, case.query_start, case.seq_lens]
    before = [tensor.clone() for tensor in inputs]
    case.run(attention)
    for tensor, copy in zip(inputs, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


def test_store_writes_the_slots_and_skips_minus_one():
    key, value = torch.randn(4, 2, 3), torch.randn(4, 2, 3)
    key_cache, value_cache = torch.zeros(3, 2, 2, 3), torch.zeros(3, 2, 2, 3)
    store(key, value, key_cache, value_cache, torch.tensor([5, -1, 0, 2]))
    for rows, cache in ((key, key_cache), (value, value_cache)):
        expected = torch.zeros(6, 2, 3)
        expected[5], expected[0], expected[2] = rows[0], rows[2], rows[3]
        assert torch.equal(cache.flatten(0, 1), expected)


def test_store_of_skipped_rows_only_changes_nothing():
    cache = torch.ones(2, 2, 1, 4)
    store(torch.zeros(3, 1, 4), torch.zeros(3, 1, 4), cache, cache, torch.tensor([-1, -1, -1]))
    assert torch.equal(cache, torch.ones(2, 2, 1, 4))


# --- copies ----------------------------------------------------------------------------------------------------------


def copy_one_by_one(cache, pairs):
    expected = cache.clone()
    for source, destination in pairs:
        expected[destination] = expected[source].clone()
    return expected


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([], id="none"),
        pytest.param([(0, 3), (1, 4)], id="apart"),
        pytest.param([(0, 3), (0, 4), (0, 5)], id="one to many"),
        pytest.param([(0, 1), (1, 2), (2, 3)], id="a chain: each copies what was copied"),
        pytest.param([(2, 3), (1, 2), (0, 1)], id="a source is reused as a destination"),
        pytest.param([(0, 2), (1, 0), (2, 1)], id="an exchange"),
        pytest.param([(0, 5), (1, 5)], id="one block twice: the last one counts"),
        pytest.param([(4, 4), (0, 1), (1, 0)], id="nothing in the end but one"),
    ],
)
def test_blocks_are_copied_as_if_one_after_another(pairs):
    caches = [torch.randn(6, 2, 3, 4), torch.randn(6, 5)]
    expected = [copy_one_by_one(cache, pairs) for cache in caches]
    copy_blocks(caches, torch.tensor(pairs, dtype=torch.int64).view(-1, 2))
    for cache, copy in zip(caches, expected, strict=True):
        assert torch.equal(cache, copy)


@given(pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_any_copies_are_as_if_one_after_another(pairs):
    cache = torch.arange(12.0).view(6, 2)
    expected = copy_one_by_one(cache, pairs)
    copy_blocks([cache], torch.tensor(pairs, dtype=torch.int64).view(-1, 2))
    assert torch.equal(cache, expected)
