"""What a compiled kernel is made of, counted from its machine code: registers, spills, shared memory, instructions."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.attention.recording import Specialisation, gpu_target

# Shared memory in KiB: all of an SM's, and the most that a program may have. The driver takes 1 KiB of each program.
# Every SM has 64k registers.
SHARED = {"sm80": (164, 163), "sm89": (100, 99), "sm90": (228, 227), "sm100": (228, 227)}
THREADS = {"sm80": 2048, "sm89": 1536, "sm90": 2048, "sm100": 2048}
MAX_PROGRAMS = {"sm80": 32, "sm89": 24, "sm90": 32, "sm100": 32}
MMA = re.compile(r"^(HMMA|HGMMA|QGMMA|UTCHMMA|UTCQMMA|QMMA|UTCOMMA)(\.[\w.]+)?")
LOAD = re.compile(r"^(LDGSTS|LDG)\b")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")


@dataclass(frozen=True)
class Counted:
    """What was counted.

    spilled: bytes of stack and local memory. loads: how many instructions read global memory, by bits a thread.
    mma: how many instructions multiply matrices, by kind. loop: how many instructions the shortest loop that
    multiplies matrices has, by the first word of their names.
    """

    registers: int
    spilled: int
    shared: int
    num_warps: int
    num_stages: int
    loads: dict[int, int] = field(default_factory=dict)
    mma: dict[str, int] = field(default_factory=dict)
    loop: dict[str, int] = field(default_factory=dict)

    def programs_per_sm(self, target: str) -> int:
        """How many programs fit on an SM at a time."""
        registers = -(-max(self.registers, 1) * 32 // 256) * 256 * self.num_warps
        by_shared = SHARED[target][0] * 1024 // (self.shared + 1024)
        by_threads = THREADS[target] // (32 * self.num_warps)
        return min(65536 // registers, by_shared, by_threads, MAX_PROGRAMS[target])


def build(specialisation: Specialisation, target: str) -> Any:
    """Compile for a target, or take it from Triton's cache. Raises what the compiler raises."""
    import triton
    from triton.compiler import ASTSource

    source = ASTSource(
        specialisation.function, specialisation.signature, specialisation.constants, specialisation.attributes
    )
    return triton.compile(source, target=gpu_target(target), options=specialisation.options)


def count(specialisation: Specialisation, target: str) -> Counted:
    """Compile and count. Raises what the compiler raises."""
    compiled = build(specialisation, target)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        used = _run("cuobjdump", "-res-usage", file.name)
        code = _run("cuobjdump", "-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", used)
    assert found, used
    registers, stack, local = map(int, found.groups())
    instructions = [(int(at, 16), name, rest) for at, name, rest in _parse(code)]
    loads: Counter[int] = Counter()
    mma: Counter[str] = Counter()
    for _, name, _rest in instructions:
        if LOAD.match(name):
            width = re.search(r"\.(32|64|128|U8|S8|U16|S16)\b", name)
            bits = {"U8": 8, "S8": 8, "U16": 16, "S16": 16}.get(width[1]) if width else 32
            loads[bits or int(width[1] if width else 32)] += 1
        kind = MMA.match(name)
        if kind:
            mma[name] += 1
    constants = specialisation.named_constants
    return Counted(
        registers,
        stack + local,
        compiled.metadata.shared,
        compiled.metadata.num_warps,
        int(constants.get("STAGES", 1)),
        dict(sorted(loads.items())),
        dict(mma),
        _main_loop(instructions),
    )


def _main_loop(instructions: list[tuple[int, str, str]]) -> dict[str, int]:
    """Count instructions of the shortest loop with two matrix products or more, by the first word of their names."""
    index_of = {at: index for index, (at, _, _) in enumerate(instructions)}
    best: list[str] | None = None
    for index, (at, name, rest) in enumerate(instructions):
        target = re.search(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
        start = index_of.get(int(target[1], 16)) if target else None
        if start is None or instructions[start][0] >= at:
            continue
        body = [word for _, word, _ in instructions[start : index + 1]]
        if sum(bool(MMA.match(word)) for word in body) >= 2 and (best is None or len(body) < len(best)):
            best = body
    return dict(Counter(word.split(".")[0] for word in best or []))


def _parse(code: str) -> list[tuple[str, str, str]]:
    return [found.groups() for line in code.splitlines() if (found := _INSTRUCTION.match(line))]  # type: ignore[misc]


def _run(tool: str, *arguments: str) -> str:
    """Run one of the tools that come with Triton, and return what it prints."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout
