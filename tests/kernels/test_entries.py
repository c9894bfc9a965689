"""Every entry of the launch table, each used once: all sizes of heads and all widths of K and V, in every kernel."""

import pytest
import torch
from model.paged_batch import PagedBatch, head_scales, store_fp8

from kvblocks.kernels import launching, table
from kvblocks.kernels.cascade import cascade_decode, own_parts
from kvblocks.kernels.decode import decode
from kvblocks.kernels.extend import extend
from kvblocks.kernels.layout import HEAD_DIMS
from kvblocks.kernels.runs import SharedRuns

DTYPES = {1: torch.bfloat16, 2: torch.bfloat16, 4: torch.float32}
"""Of queries, by the bytes of an element of K: those of one byte are e4m3."""


def attend_decode(batch, **options):
    return decode(*batch.tensors[:4], batch.seq_lens, scale=batch.scale, **options)


def attend_extend(batch, **options):
    return extend(*batch.tensors, scale=batch.scale, **options)


def attend_cascade(batch, **options):
    query, *caches, tables, _, seq_lens = batch.tensors
    tables[1, :3] = tables[0, :3]
    runs = SharedRuns.build([([0, 1], 0, 3)], len(seq_lens), query.device)
    own = own_parts(tables, seq_lens, runs, caches[0].shape[1])
    return cascade_decode(query, *caches, own, tables, runs, scale=batch.scale, **options)


DECODES = [(1, 70), (1, 50), (1, 0), (1, 5)]
CALLS = {
    "DECODE": (attend_decode, DECODES),
    "EXTEND": (attend_extend, [(40, 75), (23, 23)]),
    "EXTEND_NARROW": (attend_extend, [(2, 75), (3, 3), (1, 40)]),
    "PREFIX_DECODE": (attend_cascade, DECODES),
}


@pytest.mark.every(7)
@pytest.mark.parametrize("kernel", CALLS)
@pytest.mark.parametrize("width", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_entry_is_right(device, monkeypatch, kernel, width, head_dim):
    used = []

    def find(launches, *key):
        used.append(launches)
        return table.find(launches, *key)

    monkeypatch.setattr(launching, "find", find)
    attend, lengths = CALLS[kernel]
    batch = PagedBatch(lengths, device=device, dtype=DTYPES[width], head_dim=head_dim)
    scales = head_scales(batch) if width == 1 else {}
    if width == 1:
        store_fp8(batch, **scales)
    output, lse = attend(batch, **scales)
    assert any(launches is getattr(table, kernel) for launches in used)
    batch.check(output, lse, **scales)
