"""Counts the kernels' machine code, without a GPU: `python -m bench.attention.kernels_static [--json FILE]`.

Each case is a call of a function that launches kernels. Its launches are recorded and compiled as they would be on a
target. From the machine code (SASS) the bench counts registers, spills, shared memory, programs that fit on an SM,
bytes of K and V in flight, how wide the loads are, which matrix products there are, and how many instructions a tile of
keys takes.

The bytes in flight of an SM are its programs * (stages - 1) * the bytes of K and V in a tile, which a pipelined loop
has requested while it computes. By Little's law, keeping the memory busy takes its bandwidth times its latency, divided
by the number of SMs. For A100, H100 and B200 that is 20 to 30 KiB. The instructions of a tile are those of the shortest
loop that multiplies matrices.

Not shown: times. A count of instructions is no duration, and a share of a peak would be invented.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.conditions import keep, source

if TYPE_CHECKING:
    from bench.attention.recording import Specialisation

TARGETS = ("sm80", "sm90", "sm100")
ATTENDING = ("stream_kernel", "extend_kernel", "prefix_kernel")


@dataclass(frozen=True)
class Case:
    """A call with tensors of these shapes. The context itself is not made: kernels are compiled, not run."""

    name: str
    num_seqs: int
    rows: int
    tokens: int
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    is_shared: bool = False

    def run(self) -> None:
        """Call the function that launches the case's kernel."""
        from kvblocks.kernels.cascade import cascade_decode, own_parts
        from kvblocks.kernels.decode import decode
        from kvblocks.kernels.extend import extend
        from kvblocks.kernels.runs import SharedRuns

        query = torch.empty(self.num_seqs * self.rows, self.heads[0], self.head_dim, dtype=self.dtype)
        cache = torch.empty(2, 16, self.heads[1], self.head_dim, dtype=self.cache_dtype or self.dtype)
        tables = torch.zeros(self.num_seqs, -(-self.tokens // 16), dtype=torch.int32)
        starts = torch.arange(self.num_seqs + 1, dtype=torch.int32) * self.rows
        lengths = torch.full((self.num_seqs,), self.tokens, dtype=torch.int32)
        tensors: tuple[Tensor, ...] = (query, cache, cache)
        if self.is_shared:
            runs = SharedRuns.build([(range(self.num_seqs), 0, tables.shape[1] // 2)], self.num_seqs)
            cascade_decode(*tensors, own_parts(tables, lengths, runs, 16), tables, runs, scale=1.0)
        elif self.rows == 1:
            decode(*tensors, tables, lengths, scale=1.0)
        else:
            extend(*tensors, tables, starts, lengths, scale=1.0)


@dataclass(frozen=True)
class RowsCase(Case):
    """The kernels between a layer's matrix products and its attention, on rows of Llama 3 8B's widths."""

    hidden_size: int = 4096
    intermediate_size: int = 14_336

    def run(self) -> None:
        """Launch all of them; `place` without norms of heads, and with them as in Qwen3."""
        from kvblocks.kernels.rows import Turn, add_norm, gate, place

        num_rows, (num_heads, num_kv_heads) = self.num_seqs * self.rows, self.heads
        cache = torch.empty(2, 16, num_kv_heads, self.head_dim, dtype=self.cache_dtype or self.dtype)
        heads = torch.empty(num_rows, num_heads + 2 * num_kv_heads, self.head_dim, dtype=self.dtype)
        angles = torch.empty(32, self.head_dim // 2, dtype=self.dtype)
        slots = torch.zeros(num_rows, dtype=torch.int64)
        for norms in (None, torch.empty(num_heads + num_kv_heads, self.head_dim)):
            place(heads, Turn(angles, angles, slots, norms), (cache, cache), slots)
        rows = torch.empty(num_rows, self.hidden_size, dtype=self.dtype)
        add_norm(rows, rows, 0.0, weight=torch.empty(self.hidden_size, dtype=self.dtype))
        gate(torch.empty(num_rows, 2 * self.intermediate_size, dtype=self.dtype), "silu")


def cases() -> list[Case]:
    """Return all cases."""
    e4m3, fp32 = torch.float8_e4m3fn, torch.float32
    return [
        Case("decode 64 x 4,096", 64, 1, 4096),
        Case("decode, K and V in e4m3", 64, 1, 4096, cache_dtype=e4m3),
        Case("decode, fp32", 64, 1, 4096, fp32),
        Case("decode, 2,048 sequences", 2048, 1, 1024),
        Case("decode, 32 heads a group", 64, 1, 4096, heads=(32, 1)),
        Case("decode, fp32, 32 heads a group", 64, 1, 4096, fp32, heads=(32, 1)),
        Case("decode, fp32, 64 heads a group", 64, 1, 4096, fp32, heads=(64, 1)),
        Case("decode, head_dim 64", 64, 1, 4096, head_dim=64),
        Case("decode, head_dim 256", 64, 1, 4096, head_dim=256),
        Case("prefill 8,192", 1, 8192, 8192),
        Case("100 rows on 32,768", 1, 100, 32_868),
        Case("4 rows on 131,072", 1, 4, 131_072),
        Case("prefill, K and V in e4m3", 1, 8192, 8192, cache_dtype=e4m3),
        Case("prefill, fp32", 1, 8192, 8192, fp32),
        Case("prefill, head_dim 64", 1, 8192, 8192, head_dim=64),
        Case("prefill, head_dim 256", 1, 8192, 8192, head_dim=256),
        Case("cascade 64 x 4,096, half shared", 64, 1, 4096, is_shared=True),
        RowsCase("rows between products, 64", 64, 1, 1),
    ]


Row = dict[str, Any]


def count_case(case: Case, target: str, seen: set[str]) -> Iterator[Row]:
    """A row for each kernel that a case launches and that no earlier case has launched."""
    from bench.attention import sass
    from bench.attention.recording import record

    with record(target) as recording:
        case.run()
    for specialisation, grid in recording.first_launches():
        if specialisation.key in seen:
            continue
        seen.add(specialisation.key)
        row: Row = {"target": target, "case": case.name, "kernel": specialisation.name, "grid": list(grid)}
        try:
            counted = sass.count(specialisation, target)
        except Exception as error:  # noqa: BLE001 - the compiler may raise anything; the other rows go on
            yield row | {"error": f"{type(error).__name__}: {error}"[:500]}
            continue
        fitting = counted.programs_per_sm(target)
        row |= asdict(counted) | {"programs_per_sm": fitting, "instructions_a_tile": sum(counted.loop.values())}
        row["bytes_in_flight"] = in_flight(specialisation, fitting, case)
        yield row


def in_flight(specialisation: "Specialisation", programs: int, case: Case) -> int:
    """Bytes of K and V in flight for an SM; 0 for kernels that read neither."""
    constants = specialisation.named_constants
    if "STAGES" not in constants:
        return 0
    tile_bytes = 2 * constants["TILE_N"] * case.head_dim * (case.cache_dtype or case.dtype).itemsize
    return programs * max(constants["STAGES"] - 1, 0) * tile_bytes


def show(row: Row) -> str:
    """A line of a table in Markdown."""
    begin = f"| {row['target']} | {row['case']} | {row['kernel']} |"
    if "error" in row:
        return f"{begin} {row['error'].splitlines()[0]} |"
    loads = ", ".join(f"{number} x {bits}" for bits, number in sorted(row["loads"].items(), reverse=True))
    mma = ", ".join(sorted(row["mma"])) or "none"
    flight = f"{row['bytes_in_flight'] / 1024:.0f}" if row["bytes_in_flight"] else ""
    tile = row["instructions_a_tile"] or ""
    numbers = [row["registers"], row["spilled"], f"{row['shared'] / 1024:.0f}", row["programs_per_sm"], flight, tile]
    grid = " x ".join(map(str, row["grid"]))
    return f"{begin} {grid} | " + " | ".join(map(str, numbers)) + f" | {loads} | {mma} |"


COLUMNS = ("target", "case", "kernel", "grid", "registers", "spilled, B", "shared, KiB", "programs an SM")
COLUMNS += ("in flight, KiB", "instructions a tile", "loads x bits", "MMA")
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def main(arguments: list[str] | None = None) -> int:
    """Count all cases and return the exit status: 1 if something did not compile."""
    parser = argparse.ArgumentParser(prog="bench.attention.kernels_static", description="Counts kernels' machine code.")
    parser.add_argument("--json", type=Path, help="also write conditions and results to this file")
    parser.add_argument("--targets", default=",".join(TARGETS), help="names, separated by commas")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    given = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("kernels_static: expected TRITON_INTERPRET to be unset: it takes the compiler's place", file=sys.stderr)
        return 2
    import triton

    import kvblocks

    facts = {"kvblocks": kvblocks.__version__, "source": source(), "triton": triton.__version__}
    print(HEADER, flush=True)
    rows: list[Row] = []
    for target in given.targets.split(","):
        seen: set[str] = set()
        for case in cases():
            if given.only in case.name and not (target == "sm80" and case.cache_dtype):
                for row in count_case(case, target, seen):
                    print(show(row), flush=True)
                    rows.append(row)
    keep(given.json, facts, rows)
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
