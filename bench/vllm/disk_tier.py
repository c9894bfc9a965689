"""How fast a job of vLLM goes from host memory to a disk and back: kvblocks' tier compared with vLLM's own file tier.

    python -m bench.vllm.disk_tier [--rounds N] [--folder DIR] [--json FILE] [--quick]

Needs the environment that `make test-vllm` makes. All tiers get the same jobs by vLLM's own calls: submit a job, wait
for it, ask which jobs have ended. They take turns, every other round in reverse. Every round stores new keys. kvblocks'
tier checks every byte that it loads; vLLM's checks none. vLLM's tier is measured twice: once as it is, with O_DIRECT
where the file system supports it, and once through the page cache, as kvblocks' tier works.

What it does not show. A disk's speed, except with O_DIRECT: what was just stored is in the page cache. What a sync
costs other work: kvblocks' tier syncs once a second in a thread of its own, vLLM's never. A GPU.
"""

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench.conditions import conditions, keep, print_conditions
from bench.environments import needs
from bench.timing import Spread

CHUNKS = {"256 KiB": 2**18, "2 MiB": 2**21}


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="bench.vllm.disk_tier", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=4, help="reading threads of each tier, and as many writing ones")
    parser.add_argument(
        "--folder", type=Path, help="where to make the folders (default: the system's temporary folder)"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one round: only checks that it runs")
    given = parser.parse_args(arguments)
    with needs("vllm"):
        import vllm

        from bench.vllm.disk_jobs import BUFFERED, JOB_BYTES, OURS, THEIRS, Bench
    rows, has_direct = [], None
    for label, size in CHUNKS.items():
        folder = Path(tempfile.mkdtemp(prefix="kvblocks-bench-", dir=given.folder))
        try:
            bench = Bench(folder, size, given.threads)
            has_direct = bench.tiers[THEIRS]._use_o_direct  # noqa: SLF001
            bench.round(0)  # makes folders and touches pages
            rounds = [bench.round(number) for number in range(1, 2 if given.quick else given.rounds + 1)]
            bench.close()
        finally:
            shutil.rmtree(folder)
        for call in ("store", "load"):
            row: dict[str, Any] = {"item": f"{call}, chunks of {label}", "unit": "MB/s"}
            for name in (OURS, THEIRS, BUFFERED):
                spread = Spread([found[name, call] for found in rounds])
                row[name] = {"min": spread.low, "median": spread.median, "max": spread.high}
            ratios = Spread([found[OURS, call] / found[BUFFERED, call] for found in rounds])
            row["ratio to page cache"] = {"min": ratios.low, "median": ratios.median, "max": ratios.high}
            rows.append(row)
            medians = "".join(f"{name} {row[name]['median']:.0f}   " for name in (OURS, THEIRS, BUFFERED))
            print(f"{row['item']:<28}{medians}", flush=True)
    facts = conditions(
        vllm=vllm.__version__,
        rounds=1 if given.quick else given.rounds,
        threads=given.threads,
        job_bytes=JOB_BYTES,
        o_direct_of_vllms_tier=has_direct,
    )
    print_conditions(facts)
    if given.json is not None:
        keep(given.json, facts, rows)


if __name__ == "__main__":
    main()
