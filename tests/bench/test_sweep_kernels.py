"""A sweep of the launch table: results are on the disk at once, and a second run goes on with what is left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from bench.attention import sweep_kernels
from bench.attention.sweep_results import SweepResults
from bench.gpu_session.items import items
from kvblocks.kernels.table import Launch

KEY = ("sm90", 128, 2)
FAST, WRONG, DEADLY, LATE = (Launch(16, 4, stages) for stages in (1, 2, 3, 4))


def test_a_second_run_measures_what_the_first_did_not_reach(tmp_path):
    path = tmp_path / "sweep.json"
    results = SweepResults(path)
    assert results.measured("DECODE", KEY, FAST, lambda: (1.5, 2.0)) == (1.5, 2.0)
    assert results.measured("DECODE", KEY, WRONG, lambda: None) is None

    def die():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        results.measured("DECODE", KEY, DEADLY, die)
    with path.open("a") as file:
        file.write('{"kernel": "DEC')  # killed while it wrote
    assert [SweepResults(path).knows("DECODE", KEY, one) for one in (FAST, WRONG, DEADLY, LATE)] == [True] * 3 + [False]
    for _ in range(2):
        again, asked = SweepResults(path), []
        for launch in (FAST, WRONG, DEADLY, LATE):
            again.measured("DECODE", KEY, launch, lambda one=launch, own=asked: own.append(one) or (3.0,))
        assert asked in ([LATE], [])
        assert again.measured("DECODE", KEY, FAST, die) == (1.5, 2.0)
        assert again.measured("DECODE", KEY, DEADLY, die) is None
        assert again.measured("DECODE", KEY, LATE, die) == (3.0,)
    assert SweepResults(path).measured("EXTEND", KEY, FAST, lambda: (9.0,)) == (9.0,)


def test_what_another_gpu_took_does_not_count(tmp_path):
    """Even of the same family, such as an H100 and an H200."""
    path = tmp_path / "sweep.json"
    SweepResults(path, "NVIDIA H200").measured("DECODE", KEY, FAST, lambda: (1.5,))
    assert SweepResults(path, "NVIDIA H100").measured("DECODE", KEY, FAST, lambda: (2.5,)) == (2.5,)
    for gpu, times in (("NVIDIA H200", (1.5,)), ("NVIDIA H100", (2.5,))):
        assert SweepResults(path, gpu).measured("DECODE", KEY, FAST, lambda: (9.0,)) == times


def test_without_a_file_nothing_is_kept():
    results = SweepResults(None)
    assert results.measured("DECODE", KEY, FAST, lambda: (1.0,)) == (1.0,)
    assert SweepResults(None).measured("DECODE", KEY, FAST, lambda: (2.0,)) == (2.0,)


def test_the_sessions_command_is_one_that_the_sweep_takes(monkeypatch):
    """Its arguments once were not, and the item would have ended at once."""
    monkeypatch.setattr(sweep_kernels.torch.cuda, "is_available", lambda: False)
    (item,) = (item for item in items() if item.name == "sweep")
    place = item.command.index("bench.attention.sweep_kernels")
    monkeypatch.setattr(sys, "argv", list(item.command[place:]))
    with pytest.raises(SystemExit, match="expected a GPU"):
        sweep_kernels.main()


PROGRAM = """
import sys
from pathlib import Path
from bench.attention import sass, sweep_kernels
from kvblocks.kernels.table import DECODE, Launch

def main():
    key, cache = ("sm90", 64, 2), Path(sys.argv[1])
    before = dict(DECODE)
    launches = [Launch(16, 4, 1), Launch(32, 4, 1), Launch(7, 4, 1)]  # no tile of 7 keys can be compiled
    sweep_kernels.compile_candidates("DECODE", key, launches, 2)
    found = sorted(cache.rglob("stream_kernel.cubin"))
    assert len(found) == 2, found
    for launch in launches[:2]:
        for specialisation in sweep_kernels.record_launch(launch, "DECODE", key).specialisations.values():
            sass.build(specialisation, "sm90")
    assert sorted(cache.rglob("stream_kernel.cubin")) == found
    assert DECODE == before

if __name__ == "__main__":
    main()
"""


@pytest.mark.exhaustive
def test_candidates_are_compiled_by_several_processes_into_the_cache(tmp_path):
    """And measuring finds them there: building them again adds nothing. One that can't be compiled stops nothing."""
    program, root = tmp_path / "program.py", Path(__file__).parents[2]
    program.write_text(PROGRAM)
    cache = tmp_path / "cache"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(root), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, str(program), str(cache)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
