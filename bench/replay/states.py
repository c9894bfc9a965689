"""Compares the hit rates of ways to keep recurrent states, for real models and traces.

    python -m bench.replay.states TRACE --model qwen3-next --gb 20 60 [--sessions FROM:TO] [--processes N] [--json FILE]

The same comparison as `kvblocks replay --state-bytes` makes (docs/replay.md), with the sizes of known models, in
gigabytes of 10**9. TRACE: of any format that `kvblocks replay` reads; or JSON lines with "input" (a text), "timestamp"
(microseconds) and "session_id", as in LMCache's traces of agents. Such texts are cut into pieces of 4 characters, which
stand for tokens, since the model's tokenizer isn't here.

What it doesn't show: time; answers, which take no room here; and the live states of running requests, which lie outside
the pool.
"""

import argparse
import gzip
import json
import zlib
from collections.abc import Sequence as Items
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.conditions import conditions, keep, print_conditions
from kvblocks import Sequence
from kvblocks.replay.options import parse_arrivals, parse_range
from kvblocks.replay.readers import read_trace
from kvblocks.replay.recorder import TraceRecorder
from kvblocks.replay.states import StateModel, StateOptions, compare_states
from kvblocks.replay.trace import Trace

MODELS = {
    # 12 layers of 2 KV heads of 256; 36 gated delta nets: 32 value heads, 16 key heads, of 128, a convolution of 4
    "qwen3-next": StateModel(12 * 2 * 2 * 256 * 2, 36 * 2 * (32 * 128 * 128 + 3 * 8192), 544),
    # the same with states in float32; the inputs of the convolution stay in bf16
    "qwen3-next-fp32": StateModel(12 * 2 * 2 * 256 * 2, 36 * (4 * 32 * 128 * 128 + 2 * 3 * 8192), 1056),
    # 7 layers of MLA with 576 values; 20 of KDA: 32 heads of 128 by 128 in float32, three convolutions of 4
    "kimi-linear": StateModel(7 * 576 * 2, 20 * (4 * 32 * 128 * 128 + 2 * 3 * 3 * 4096), 1920),
    # 4 layers of 8 KV heads of 128; 24 of Mamba2: 128 heads of 64 by 128 in float32, a convolution of 4
    "nemotron-h": StateModel(4 * 2 * 8 * 128 * 2, 24 * (4 * 128 * 64 * 128 + 2 * 3 * 10240), 1040),
    # 6 layers of 8 KV heads of 64; 10 short convolutions of 2048 channels that keep 2 inputs
    "lfm2": StateModel(6 * 2 * 8 * 64 * 2, 10 * 2 * 2048 * 2),
}
"""Sizes by the models' default configurations, in bf16 unless stated otherwise."""

TEXT_BLOCK, PIECE = 16, 4  # tokens in a block of a text trace, characters in a token


def read(path: Path) -> Trace:
    """Read the trace in a file, which may contain texts."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        first = json.loads(file.readline())
        if "input" not in first:
            return read_trace(path)
        with TemporaryDirectory() as folder:
            own = Path(folder) / path.name.removesuffix(".gz")
            recorder = TraceRecorder(own, TEXT_BLOCK, key=bytes(16))
            for number, row in enumerate([first, *map(json.loads, file)]):
                text = row["input"]
                pieces = [zlib.crc32(text[at : at + PIECE].encode()) for at in range(0, len(text), PIECE)]
                sequence = Sequence(number, pieces, session=row["session_id"])
                recorder.record(sequence, arrived_s=row["timestamp"] / 1e6, seconds=0.0)
            recorder.close()
            return read_trace(own)


def main(arguments: Items[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="bench.replay.states", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", choices=MODELS, default="qwen3-next")
    parser.add_argument("--gb", type=float, nargs="+", default=[20.0, 60.0])
    parser.add_argument("--sessions", help="FROM:TO: only these sessions")
    parser.add_argument("--processes", type=int, default=None, help="default: one for each core")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    trace = read(given.trace)
    if given.sessions is not None:
        trace = trace.take_sessions(*parse_range(given.sessions))
    model = MODELS[given.model]
    facts = conditions(trace=trace.name, num_requests=trace.num_requests, model=given.model, **asdict(model))
    facts = {key: value for key, value in facts.items() if key not in ("num_blocks", "block_size", "collector")}
    print_conditions(facts)
    options = StateOptions(model, tuple(int(gb * 10**9) for gb in given.gb), parse_arrivals(None, trace))
    result = compare_states(trace, options, given.processes)
    print(f"\n{'GB':>6}  {'design':14}{'hit %':>8}{'KV %':>8}{'saved':>9}{'no room':>9}{'seconds':>9}")
    for row in result.rows:
        print(
            f"{row.num_bytes / 1e9:6g}  {row.design:14}{100 * row.hit_rate:8.2f}"
            f"{100 * row.num_cached / row.num_tokens:8.2f}{row.num_saved:9,}{row.num_without_room:9,}{row.wall_s:9.0f}"
        )
    keep(given.json, facts, [asdict(row) for row in result.rows])


if __name__ == "__main__":
    main()
