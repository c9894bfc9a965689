"""Compile the kernels for GPUs that are not there: every entry of the table, down to machine code.

`python tests/kernels/aot.py` prints what each became: registers, spills, shared memory, tensor-core instructions. It
must run without TRITON_INTERPRET, which is why test_aot.py starts it as a process: the interpreter takes the place of
the compiler for a whole process. `--only NAME` compiles the kernels whose name begins so; `--json` prints JSON.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aot_tasks
from aot_tasks import Compilation

INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "tcgen05": r"\btcgen05\.mma",
    "mfma": r"\bv_mfma",
    "cp_async": r"\bcp\.async\.c[ag]",
}


@dataclass(frozen=True)
class Compiled:
    """What came of it. `error` is the compiler's, and the rest then says nothing."""

    name: str
    target: str
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    error: str | None = None


def compile_one(task: Compilation) -> Compiled:
    """Compile, and read the machine code's use of resources."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"kvblocks.kernels.{task.module}"), task.function)
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in task.constants else task.types.get(name, "i32")
        # As at run time: allocations are aligned, and so are all strides of usual head_dims.
        if signature[name].startswith("*") or name.startswith("stride_"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=task.constants, attrs=attributes)
    is_amd = task.target.startswith("gfx")
    target = GPUTarget("hip", task.target, 64) if is_amd else GPUTarget("cuda", int(task.target[2:]), 32)
    try:
        compiled = triton.compile(source, target=target, options={"num_warps": task.num_warps})
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this entry's result
        return Compiled(task.name, task.target, error=f"{type(error).__name__}: {error}"[-2000:])
    text = compiled.asm["amdgcn" if is_amd else "ptx"]
    found = {name: len(re.findall(pattern, text)) for name, pattern in INSTRUCTIONS.items()}
    registers, spilled = _amd_registers(text) if is_amd else _cuda_registers(compiled.asm["cubin"])
    return Compiled(
        task.name,
        task.target,
        registers,
        spilled,
        shared=compiled.metadata.shared,
        instructions={name: count for name, count in found.items() if count},
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


def compile_all(only: str = "", num_processes: int | None = None) -> list[Compiled]:
    """Compile every task whose name begins with `only`, in a few processes and with a cache that is thrown away."""
    tasks = [task for task in aot_tasks.all_tasks() if task.name.startswith(only)]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvblocks-aot-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        with ProcessPoolExecutor(num_processes or min(4, os.cpu_count() or 1), context) as pool:
            return list(pool.map(compile_one, tasks))


def main() -> None:
    """Print what every task became."""
    parser = argparse.ArgumentParser(prog="aot.py")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--processes", type=int)
    given = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        sys.exit("aot.py: expected TRITON_INTERPRET to be unset: the interpreter takes the compiler's place")
    results = compile_all(given.only, given.processes)
    if given.json:
        print(json.dumps([asdict(result) for result in results]))
        return
    for result in results:
        got = result.error or f"{result.registers:>4} {result.spilled:>5} {result.shared:>7}  {result.instructions}"
        print(f"{result.target:<7} {result.name:<40.40} {got}")


if __name__ == "__main__":
    main()
