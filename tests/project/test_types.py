"""What a type checker says of calls: it refuses what the run time refuses, and takes what that takes."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CALLS = """\
from array import array

from kvblocks import FullAttention, KVCacheManager, PrefixCache, Sequence

Sequence(1, [1, 2])
Sequence("a", (1, 2))
Sequence((1, "two"), range(3))
Sequence(None, array("I", [1]))
Sequence(b"a", b"abcd")
Sequence(2.5, bytearray(4))
Sequence(1, memoryview(b"abcd"))
Sequence(1, {1, 2})
Sequence(1, (token for token in [1, 2]), salt="a", lora=None, extra_keys=[(0, 1, "key"), (1, 2, b"key")])
Sequence(1, "abc")  # refused
Sequence("a", 5)  # refused
Sequence("a", ["b"])  # refused
Sequence("a", [1.5])  # refused
Sequence("a", None)  # refused
Sequence("a", [1], salt=5)  # refused
manager = KVCacheManager(8, groups=[FullAttention(16)], debug=True, pin_budget=1, hash_algorithm="sha256")
KVCacheManager(8, debug=1)  # refused
KVCacheManager("8")  # refused
KVCacheManager(8, eviction="slru").now = 1.5
KVCacheManager(8, eviction=5)  # refused
manager.now = "now"  # refused
sequence = Sequence(1, [1])
manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
manager.append_slots(sequence, [1])
manager.append_step([sequence], [1])
manager.free(sequence)
manager.free(1)  # refused
manager.allocate_slots(sequence, hit=sequence)  # refused
manager.append_slots("a", [1])  # refused
manager.pins.unpin(manager.pins.pin([1] * 8))
manager.pins.unpin(5)  # refused
PrefixCache(8).insert_prefix([1], [], pin=True)
PrefixCache(8).insert_prefix([1], [], pin="yes")  # refused
"""
NUMPY_CALLS = """\
import numpy

Sequence(numpy.int64(1), numpy.arange(3))
Sequence(1, [numpy.int64(1)], extra_keys=[])
KVCacheManager(numpy.int64(8), numpy.int64(4))
"""
TORCH_CALLS = """\
import torch

Sequence(1, torch.arange(3))
"""


@pytest.mark.exhaustive
def test_a_type_checker_refuses_what_the_run_time_refuses(tmp_path: Path) -> None:
    if find_spec("mypy") is None:
        pytest.skip("needs the extra kvblocks[dev]")
    text = CALLS
    for package, calls in (("numpy", NUMPY_CALLS), ("torch", TORCH_CALLS)):
        text += calls if find_spec(package) is not None else ""
    (tmp_path / "calls.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(tmp_path), "calls.py"]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    refused = [int(line) for line in re.findall(r"^calls\.py:(\d+): error", result.stdout, re.MULTILINE)]
    expected = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# refused")]
    assert sorted(set(refused)) == expected, result.stdout + result.stderr
