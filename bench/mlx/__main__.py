"""Compares search, insertion and hit of mlx-lm's prompt cache and ours.

    .venv-mlx/bin/python -m bench.mlx [--tokens 1000 10000 100000] [--rounds N] [--json FILE]

A cache holds one prompt of N tokens of random KV: 4 layers, 2 KV heads of 64, float16, 2 KB a token.

- search: an unknown prompt of N tokens, and one that was edited at 90 %. mlx-lm's search for the edited one looks at
  every token after the edit. A hit's copy doesn't count here, since its arrays are not computed.
- hit: the prompt and one more token, whose KV is written, which is when mlx-lm's copy is made.
- insert: 512 tokens after the prompt, as added by a turn of a chat.

The contestants take turns; the minimum, median and maximum of the rounds are printed. What it doesn't show: a GPU, a
model, and a large model's KV.
"""

import argparse
from pathlib import Path

from bench.conditions import conditions, keep, print_conditions
from bench.environments import needs


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.mlx", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with needs("mlx"):
        import mlx.core as mx

        from bench.mlx.cases import HEADS, LAYERS, MAKERS, SIZE, measure
    facts = conditions(mlx=mx.__version__, rounds=given.rounds, kv_bytes_a_token=LAYERS * HEADS * SIZE * 2 * 2)
    facts = {key: value for key, value in facts.items() if key not in ("num_blocks", "block_size", "collector")}
    print_conditions(facts)
    print(f"{'tokens':>8} {'ms':<16} {'mlx-lm: min median max':>28} {'kvblocks':>28} {'ratio':>7}")
    rows = []
    for number in given.tokens:
        for case, found in measure(number, given.rounds).items():
            spreads = {
                name: [round(value / 1e6, 3) for value in (one.low, one.median, one.high)]
                for name, one in found.items()
            }
            ratio = found["mlx-lm"].low / found["kvblocks"].low
            shown = ["{:9.2f} {:9.2f} {:9.2f}".format(*spreads[name]) for name in MAKERS]
            print(f"{number:>8} {case:<16} {shown[0]:>28} {shown[1]:>28} {ratio:7.2f}", flush=True)
            rows.append({"tokens": number, "case": case, "ms": spreads, "ratio": round(ratio, 3)})
    if given.json is not None:
        keep(given.json, facts, rows)


if __name__ == "__main__":
    main()
