"""Kernels compile for GPUs that this machine doesn't have: within the chips' limits, for tensor cores, without spills.

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


def compile_calls(*arguments):
    """The results of aot.py, which runs in a process of its own: see there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Newer versions warn that its default will change. Ours is theirs of today.
    environment.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    command = [sys.executable, str(Path(__file__).with_name("aot.py")), "--json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled():
    """What the usual calls launch, by target."""
    results = compile_calls()
    return {target: [result for result in results if result["target"] == target] for target in TARGETS}


def find(compiled, targets, calls, kernels):
    """The results of some targets, for compiled calls and kernels whose names begin so."""
    found = [
        result
        for target in targets
        for result in compiled[target]
        if result["call"].startswith(calls) and result["kernel"].startswith(kernels)
    ]
    assert found
    return [result for result in found if result["error"] is None]


def spilling(results):
    """Bytes that kernels spill, by call and kernel."""
    return {
        f"{found['target']} {found['call']}: {found['kernel']}": found["spilled"]
        for found in results
        if found["spilled"]
    }


def crowded(results):
    """Kernels whose grid counts on more programs on an SM than fit there."""
    return [found for found in results if found["fitting"] and found["programs"] > found["fitting"]]


# The first test waits for all compilations.
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("target", TARGETS)
def test_every_entry_compiles(compiled, target):
    failed = {f"{found['call']}: {found['kernel']}": found["error"] for found in compiled[target] if found["error"]}
    assert failed == {}
    assert len(compiled[target]) > 20


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_spilled(compiled, target):
    assert spilling(compiled[target]) == {}


@pytest.mark.parametrize("target", TARGETS)
def test_shared_memory_is_within_the_chips_limit(compiled, target):
    limit = {"sm80": 163, "sm89": 99, "sm90": 227, "sm100": 227, "gfx942": 64}[target] * 1024
    assert {found["call"]: found["shared"] for found in compiled[target] if found["shared"] > limit} == {}


@pytest.mark.parametrize("target", TARGETS[:-1])
def test_as_many_programs_fit_on_an_sm_as_grids_count_on(compiled, target):
    assert crowded(compiled[target]) == []
    assert any(found["programs"] > 1 for found in compiled[target])


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_whatever_the_group_the_page_and_the_options():
    results = compile_calls("--all")
    assert len(results) > 500
    assert [found for found in results if found["error"]] == []
    assert spilling(results) == {}
    assert crowded(results) == []


def test_the_tensor_cores_of_each_chip_are_used(compiled):
    """For queries of 16 bits. fp32 is multiplied exactly, without tensor cores."""
    expected = {"sm80": "mma", "sm89": "mma", "sm90": "wgmma", "sm100": "tcgen05", "gfx942": "mfma"}
    for target, instruction in expected.items():
        for result in find(compiled, [target], ("prompt", "cascade"), ("extend_kernel", "prefix_kernel")):
            # Warps' tensor cores, with fewer instructions a key. The instructions of warpgroups would spill.
            is_narrow = target == "sm90" and result["call"].startswith("prompt, 256 x 1 bytes")
            if "x 4 bytes" not in result["call"]:
                assert result["instructions"].get("mma" if is_narrow else instruction, 0) > 0, result
    for result in find(compiled, TARGETS, ("verification", "decode"), ("extend_kernel", "stream_kernel")):
        if "x 4 bytes" not in result["call"]:
            assert result["instructions"].get("mfma" if result["target"] == "gfx942" else "mma", 0) > 0, result


def test_k_and_v_are_copied_while_the_tile_before_is_computed(compiled):
    """Where asynchronous copies exist. A loop that the compiler did not pipeline loads without them."""
    attending = ("extend_kernel", "prefix_kernel", "stream_kernel", "split_kernel")
    for result in find(compiled, ("sm80", "sm89", "sm90", "sm100"), "", attending):
        assert result["instructions"].get("cp_async", 0) > 0, result
