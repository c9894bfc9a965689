"""The table of launch settings: every shape has an entry, and each GPU finds the entries of its family.

A missing entry would show only on a GPU that no test runs on.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from kvblocks.kernels import table
from kvblocks.kernels.layout import BLOCK_SIZES, HEAD_DIMS
from kvblocks.kernels.table import Launch

KERNELS = {name: value for name, value in vars(table).items() if name[0].isupper() and isinstance(value, dict)}


def test_the_tables_are_found():
    assert "DECODE" in KERNELS


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_every_shape_has_an_entry_whatever_the_device(kernel):
    for head_dim, element_bytes in product(HEAD_DIMS, (1, 2, 4)):
        found = table.find(kernel, torch.device("cpu"), head_dim, element_bytes)
        assert found is kernel["any", head_dim, element_bytes]


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_entries_are_for_what_exists(kernel):
    for (family, head_dim, element_bytes), launch in kernel.items():
        assert family in table.FAMILIES
        assert head_dim in HEAD_DIMS
        assert element_bytes in {1, 2, 4}
        for size in (launch.tile_keys, launch.tile_rows, launch.num_warps):
            assert size & (size - 1) == 0, "expected powers of 2"
        assert launch.tile_keys >= min(BLOCK_SIZES)
        assert launch.num_stages >= 1
        assert launch.programs_per_sm >= 1


@pytest.mark.parametrize(
    ("capability", "family"),
    [((7, 5), "any"), ((8, 0), "sm80"), ((8, 6), "sm89"), ((8, 9), "sm89"), ((9, 0), "sm90"), ((10, 0), "sm100")],
)
def test_families_of_nvidia(monkeypatch, capability, family):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert table.family(torch.device("cuda")) == family
    kernel = {(family, 64, 2): Launch(16, 4, 1), ("any", 64, 2): Launch(32, 4, 1)}
    assert table.find(kernel, torch.device("cuda"), 64, 2) == kernel[family, 64, 2]
    assert table.find({("any", 64, 2): Launch(32, 4, 1)}, torch.device("cuda"), 64, 2).tile_keys == 32


class Properties:
    gcnArchName = "gfx942:sramecc+:xnack-"  # noqa: N815 - AMD's name for it
    multi_processor_count = 304


def test_families_of_amd_and_the_size_of_a_fixed_grid(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert table.family(torch.device("cuda")) == "gfx942"
    assert table.count_programs(torch.device("cuda"), Launch(16, 4, 1, programs_per_sm=2)) == 608
    assert table.count_programs(torch.device("cpu"), Launch(16, 4, 1, programs_per_sm=3)) == 6


@pytest.mark.parametrize(
    ("rows", "element_bytes", "expected"),
    [
        (16, 2, Launch(64, 4, 3, programs_per_sm=3)),
        (32, 2, Launch(64, 4, 3, programs_per_sm=2)),
        (64, 2, Launch(64, 4, 3, programs_per_sm=1)),
        (128, 2, Launch(64, 8, 2, programs_per_sm=1)),
        (64, 4, Launch(32, 8, 3, programs_per_sm=1)),
        (128, 4, Launch(32, 16, 2, programs_per_sm=1)),
    ],
)
def test_groups_of_more_heads_than_an_entry_is_for(rows, element_bytes, expected):
    launch = Launch(64, 4, 3, programs_per_sm=3)
    assert table.widen(launch, rows, 128, element_bytes, "sm90") == expected
    assert table.widen(launch, 32, 128, element_bytes, "sm80").programs_per_sm == 1


def test_a_device_is_asked_for_its_properties_once(monkeypatch):
    """Except "cuda" without a number, which is the current device."""
    asked = []
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked.append(device) or Properties)
    first, second, current = torch.device("cuda:97"), torch.device("cuda:98"), torch.device("cuda")
    for _ in range(3):
        for device in (first, second):
            assert (table.family(device), table.count_sms(device)) == ("sm90", 304)
    assert asked == [first, first, second, second]
    for _ in range(2):
        assert (table.family(current), table.count_sms(current)) == ("sm90", 304)
    assert asked[4:] == [current] * 4


def test_calls_with_options_ask_for_as_many_programs_as_fit():
    key = ("sm90", 128, 2)
    entry = table.DECODE[key]
    both = table.make_room(entry, key, has_softcap=True, has_sinks=True)
    assert (entry.programs_per_sm, both) == (3, replace(entry, programs_per_sm=2))
    assert (
        table.make_room(replace(entry, programs_per_sm=1), key, has_softcap=True, has_sinks=True).programs_per_sm == 1
    )
    for flags in ({"has_softcap": True, "has_sinks": False}, {"has_softcap": False, "has_sinks": True}):
        assert table.make_room(entry, key, **flags) is entry
    assert table.make_room(entry, ("sm100", 64, 2), has_softcap=True, has_sinks=True) is entry
    assert {table.DECODE[crowded].programs_per_sm for crowded in table.CROWDED} == {3}  # else they need no exception
