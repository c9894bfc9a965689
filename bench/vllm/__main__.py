"""vLLM's scheduler with three KV cache managers: its own, kvblocks, and one that does nothing.

    python -m bench.vllm [--rounds N] [--quick] [--sequences N [N ...]] [--json FILE]

Needs the environment that `make test-vllm` makes: .venv-vllm/bin/python. The three take turns in one process, every
other round in reverse. Times are processor time of the thread, so other work on the machine matters less. The minimum
of the rounds is what counts; median and maximum are printed too. "saved" is what kvblocks saves, as a share of what the
manager that does nothing saves, which is the most that any manager can save. With --sequences only steps of these
numbers of sequences are measured, over the short prefix.

What it does not show: a model, a GPU, and what overlaps with them; with async scheduling a step's time is hidden as
long as it is shorter than the model's. Requests that come and go, evictions and preemptions: all sequences decode.
Hashing that other processes do for vLLM's router. Memory.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.conditions import UNJUDGED, conditions, keep, print_conditions
from bench.environments import needs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.vllm", description="vLLM's scheduler with three KV cache managers.")
    parser.add_argument("--rounds", type=int, default=15, help="turns that each manager gets (default 15)")
    parser.add_argument("--quick", action="store_true", help="few sequences, short prefixes")
    parser.add_argument("--sequences", type=int, nargs="+", metavar="N", help="time only steps of N sequences")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep conditions and results in FILE")
    given = parser.parse_args(arguments)
    with needs("vllm"):
        import vllm

        from bench.vllm.contestants import BLOCK_SIZE
        from bench.vllm.managers import PREFIXES, measure, measure_steps, print_targets
        from bench.vllm.schedulers import ADAPTER, HASH
        from bench.vllm.steps import ROUND_STEPS
    facts = conditions(
        vllm=vllm.__version__,
        adapter=ADAPTER,
        hash=f"{HASH}, for vLLM's manager alone",
        num_blocks="as many as all sequences need",
        block_size=BLOCK_SIZE,
        num_rounds=given.rounds,
        steps_a_round=ROUND_STEPS,
        model="none: its answers are mocked",
    )
    print_conditions(facts)
    if given.sequences:
        rows = measure_steps(given.rounds, PREFIXES[:1], given.sequences)
    else:
        rows = measure(given.rounds, quick=given.quick)
    gc.unfreeze()  # undoes what `settle` froze; otherwise vLLM's extensions report leaks at exit
    keep(given.json, facts, rows)
    if given.quick:
        print(UNJUDGED)
        return 0
    return int(not print_targets(rows))


if __name__ == "__main__":
    sys.exit(main())
