"""Compile the kernels that aot_calls.py launches to machine code, for GPUs that this machine doesn't have.

`python tests/kernels/aot.py` prints what each became: registers, spills, shared memory, tensor-core instructions. It
must run without TRITON_INTERPRET, which is why test_aot.py starts it as a process: the interpreter takes the place of
the compiler for a whole process. `--all`: all calls rather than the usual ones; `--target sm90`: those for one GPU;
`--only TEXT`: those with this text in their line; `--json`: print JSON. Triton's cache is used, and kept, where
TRITON_CACHE_DIR names one.
"""

import argparse
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import aot_calls

from bench.attention import sass
from bench.attention.recording import record

INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "tcgen05": r"\btcgen05\.mma",
    "mfma": r"\bv_mfma",
    "cp_async": r"\bcp\.async\.c[ag]",
    "lets_begin": r"\bgriddepcontrol\.launch_dependents",
    "waits": r"\bgriddepcontrol\.wait",
}
ROWS = re.compile(r"\b(?:ld\.global\.v|st\.global)")


@dataclass(frozen=True)
class Compiled:
    """The result of compiling a kernel. With an `error` of the compiler, the other fields have no meaning.

    call: what launched it; launched: how many programs; programs: how many the launch's fixed grid counts on for each
    SM, or 0; fitting: how many fit on one; is_early: whether it may begin before the launch before it has ended (PDL);
    before_wait: how many stores and loads of whole rows it then has in front of its wait.
    """

    call: str
    kernel: str
    target: str
    launched: int = 0
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    programs: int = 0
    fitting: int = 0
    is_early: bool = False
    before_wait: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    error: str | None = None


def compile_call(call: aot_calls.Call) -> list[Compiled]:
    """Record a call, and compile what it launches."""
    target, make, model = call
    with record(target) as recording:
        make(model)
    name = f"{make.__name__.removeprefix('make_')}, {model}"
    sms = recording.count_sms
    return [compile_one(name, launched, grid, target, sms) for launched, grid in recording.first_launches()]


def compile_one(call, launched, grid, target, sms) -> Compiled:
    """Compile, and read the machine code's use of resources."""
    name = launched.name
    try:
        compiled = sass.build(launched, target)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this kernel's result
        return Compiled(call, name, target, error=f"{type(error).__name__}: {error}"[-2000:])
    is_amd = target.startswith("gfx")
    text = compiled.asm["amdgcn" if is_amd else "ptx"]
    found = {kind: len(re.findall(pattern, text)) for kind, pattern in INSTRUCTIONS.items()}
    registers, spilled = _amd_registers(text) if is_amd else _cuda_registers(compiled.asm["cubin"])
    shared = compiled.metadata.shared
    counted = sass.Counted(registers, spilled, shared, compiled.metadata.num_warps, 1)
    is_shared_out = "part_ptr" in launched.function.arg_names and name.endswith(
        ("stream_kernel", "extend_kernel", "prefix_kernel")
    )
    return Compiled(
        call,
        name,
        target,
        math.prod(grid),
        registers,
        spilled,
        shared,
        grid[0] // sms if is_shared_out else 0,
        0 if is_amd else counted.programs_per_sm(target),
        launched.options.get("launch_pdl", False),
        len(ROWS.findall(text.partition("griddepcontrol.wait")[0])) if "griddepcontrol.wait" in text else 0,
        {kind: number for kind, number in found.items() if number},
    )


def _amd_registers(text: str) -> tuple[int, int]:
    """Vector registers, and registers spilled."""
    numbers = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}
    return numbers["vgpr_count"], numbers["vgpr_spill_count"]


def _cuda_registers(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and of local memory: none where nothing is spilled."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", printed).groups()
    return int(registers), int(stack) + int(local)


def compile_all(calls: list[aot_calls.Call], num_processes: int | None = None) -> Iterator[Compiled]:
    """Compile what calls launch, in a few processes, with Triton's cache or one that is thrown away."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvblocks-aot-") as folder:
        os.environ.setdefault("TRITON_CACHE_DIR", folder)
        with ProcessPoolExecutor(num_processes or min(4, os.cpu_count() or 1), context) as pool:
            for found in pool.map(compile_call, calls):
                yield from found


def main() -> None:
    """Print the results of all kernels."""
    parser = argparse.ArgumentParser(prog="aot.py")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--target", choices=aot_calls.TARGETS)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--processes", type=int)
    given = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        sys.exit("aot.py: expected TRITON_INTERPRET to be unset: the interpreter takes the compiler's place")
    calls = list(aot_calls.all_calls() if given.all else aot_calls.usual_calls())
    calls = [call for call in calls if given.target in (None, call[0])]
    calls = [call for call in calls if given.only in f"{call[0]} {call[1].__name__}, {call[2]}"]
    results = compile_all(calls, given.processes)
    if given.json:
        print(json.dumps([asdict(result) for result in results]))
        return
    for result in results:
        got = result.error or (
            f"{result.registers:>4} {result.spilled:>5} {result.shared:>7} {result.programs}/{result.fitting}"
            f"  {result.instructions}"
        )
        print(f"{result.target:<7} {result.kernel:<20} {result.call:<60} {got}", flush=True)


if __name__ == "__main__":
    main()
