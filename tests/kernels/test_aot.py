"""Kernels compile for GPUs that are not there, without spills, within the chips' limits and onto their tensor cores.

Which triton is installed decides what comes out; these are expectations of the pinned one. A target that its toolchain
can't compile for fails by name.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TARGETS = ("sm80", "sm89", "sm90", "sm100", "gfx942")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled():
    """What aot.py makes of every entry of the table, by target. In a process of its own: see there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Newer versions warn that its default will change. Ours is theirs of today.
    environment.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    command = [sys.executable, str(Path(__file__).with_name("aot.py")), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout)
    return {target: [result for result in results if result["target"] == target] for target in TARGETS}


def find(compiled, targets, *names):
    """The results of some targets for kernels whose names begin with one of `names`, and that were compiled."""
    found = [result for target in targets for result in compiled[target] if result["name"].startswith(names)]
    assert found
    return [result for result in found if result["error"] is None]


# The first test waits for all compilations.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", TARGETS)
def test_every_entry_compiles(compiled, target):
    failed = {result["name"]: result["error"] for result in compiled[target] if result["error"] is not None}
    assert failed == {}
    assert len(compiled[target]) > 20


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_spilled(compiled, target):
    assert {result["name"]: result["spilled"] for result in compiled[target] if result["spilled"] > 0} == {}


@pytest.mark.parametrize("target", TARGETS)
def test_shared_memory_is_within_the_chips_limit(compiled, target):
    limit = {"sm80": 163, "sm89": 99, "sm90": 227, "sm100": 227, "gfx942": 64}[target] * 1024
    assert {result["name"]: result["shared"] for result in compiled[target] if result["shared"] > limit} == {}


def test_the_tensor_cores_of_each_chip_are_used(compiled):
    """Where queries are 16 bits wide: fp32 is multiplied exactly, without them."""
    wide = ("extend,", "extend with", "prefix_decode")
    expected = {"sm80": "mma", "sm89": "mma", "sm90": "wgmma", "sm100": "tcgen05", "gfx942": "mfma"}
    for target, instruction in expected.items():
        for result in find(compiled, [target], *wide):
            if not result["name"].endswith("x 4 bytes"):
                assert result["instructions"].get(instruction, 0) > 0, result
    for result in find(compiled, TARGETS, "extend_narrow", "decode"):
        if not result["name"].endswith("x 4 bytes"):
            assert result["instructions"].get("mfma" if result["target"] == "gfx942" else "mma", 0) > 0, result


def test_k_and_v_are_copied_while_the_tile_before_is_computed(compiled):
    """Where asynchronous copies exist. A loop that the compiler did not pipeline loads without them."""
    for result in find(compiled, ("sm80", "sm89", "sm90", "sm100"), "extend", "prefix_decode", "decode"):
        assert result["instructions"].get("cp_async", 0) > 0, result
