"""The benefit of tiers below the device, with SmolLM2 on a CPU.

    python -m bench.tiers [--model smollm2] [--prefix 1024] [--rounds 5] [--threads 1] [--json FILE] [--quick]

There are three parts:

- Time to the first token of a prompt whose prefix has to be computed, is on the device, on the host, or on a disk that
  another engine filled before. The disk's files are in the page cache; "keyed" has a keyed checksum; for "cold" the
  system is told to drop them from the page cache. Every round has a prompt of its own, and asks it in all these ways.
- Bandwidth by the size of a block: batches of 32 blocks at random places, beside one copy of as many bytes, and plain
  files.
- The cost of tiers where no prompt comes twice.

What it does not show. A disk's speed: all files but the "cold" ones are in the page cache, and it is not known whether
the system really drops those, or a layer below it keeps them. A load that competes with steps of others. A GPU: there
transfers have a stream of their own, and the bus limits them. Other models: results depend on how large a token's KV is
and what computing it costs.
"""

import argparse
from pathlib import Path

import torch

from bench.conditions import conditions, keep, print_conditions
from bench.tiers.bandwidth import BATCH, BLOCK_BYTES, time_bandwidth
from bench.tiers.first_token import Rounds
from bench.tiers.overhead import time_overhead
from bench.timing import Spread
from kvblocks.engine.run.runner import LoadedModel


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="bench.tiers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens of the prefix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one round, small blocks: to see that it runs")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    model = LoadedModel.load(given.model)
    num_rounds = 1 if given.quick else given.rounds
    facts = conditions(model=str(given.model), threads=given.threads, num_rounds=num_rounds, prefix=given.prefix)
    facts = {key: value for key, value in facts.items() if key != "num_blocks"}
    print_conditions(facts)
    rounds = Rounds(model, given.prefix)
    results: list[dict[str, object]] = []
    found = rounds.run(num_rounds)
    print(f"\nTime to the first token, ms ({rounds.num_loaded_bytes / 1e6:.0f} MB loaded)")
    results += _show("first token, ms", found, "device", 1.0)
    _show("", {"opening the disk": Spread(rounds.open_ms)}, None, 1.0)
    for block_bytes in BLOCK_BYTES[:1] if given.quick else BLOCK_BYTES:
        bandwidth = time_bandwidth(block_bytes, num_rounds)
        print(f"\nGB/s, blocks of {block_bytes // 1024} KiB, batches of {BATCH}")
        for name, spread in bandwidth.items():
            share = bandwidth["one copy"].low / spread.low
            rates = [1 / value for value in (spread.high, spread.median, spread.low)]
            print(f"  {name:24}{rates[0]:9.2f}{rates[1]:9.2f}{rates[2]:9.2f}  {share:6.2f} of one copy", flush=True)
            row = dict(zip(("min", "median", "max"), rates, strict=True))
            results.append({"item": f"GB/s at {block_bytes}", "contestant": name, **row, "ratio": share})
    for kind, spreads in time_overhead(model, 2 * num_rounds).items():
        print(f"\nNothing shared, seconds a round ({kind})")
        results += _show(f"nothing shared, {kind} s", spreads, "without", 1.0)
    keep(given.json, facts, results)


def _show(item: str, spreads: dict[str, Spread], base: str | None, scale: float) -> list[dict[str, object]]:
    """Print rows of (min, median, max, ratio of the medians to the base's), and return them."""
    rows: list[dict[str, object]] = []
    for name, spread in spreads.items():
        values = [scale * value for value in (spread.low, spread.median, spread.high)]
        ratio = None if base is None else spread.median / spreads[base].median
        said = "" if ratio is None else f"  {ratio:7.3f} of {base}"
        print(f"  {name:24}{values[0]:9.3f}{values[1]:9.3f}{values[2]:9.3f}{said}", flush=True)
        row = dict(zip(("min", "median", "max"), values, strict=True))
        rows.append({"item": item, "contestant": name, **row, "ratio": ratio})
    return rows


if __name__ == "__main__":
    main()
