"""What `kvblocks replay` compares in addition to policies: ways to keep recurrent states, and entrances of a server.

Needs no torch.
"""

import sys
from dataclasses import replace
from pathlib import Path

from kvblocks.arguments import counted, shown
from kvblocks.cli.replay.output import publish, show_progress
from kvblocks.errors import InvalidArgumentError
from kvblocks.replay.options import parse_arrivals, parse_bytes, parse_memory, parse_size, parse_sizes
from kvblocks.replay.report.loads import render_loads
from kvblocks.replay.report.states import render_states, rows_by_size
from kvblocks.replay.served.loads import LoadOptions, LoadResult, delays
from kvblocks.replay.served.run import ServerModel
from kvblocks.replay.states import StateModel, StateOptions, StateResult, compare_states
from kvblocks.replay.trace import Trace


def compare_designs(
    trace: Trace,
    workload: tuple[str, str | None, int],
    model: tuple[str | None, str | None, int | None],
    jobs: int | None,
    files: tuple[Path | None, Path | None],
) -> None:
    """Replay a trace with all designs, print a table, and write files.

    workload: --sizes, --arrivals and --seed. model: --state-bytes, --kv-bytes and --large-block. files: --json and
    --report. Raises InvalidArgumentError.
    """
    sizes, arrivals, seed = workload
    state_text, kv_text, large_block = model
    if state_text is None or kv_text is None:
        raise InvalidArgumentError(
            "expected --state-bytes and --kv-bytes together, with or without --large-block, got one without the others"
        )
    state_bytes, kv_bytes = parse_bytes("--state-bytes", state_text), parse_bytes("--kv-bytes", kv_text)
    options = StateOptions(
        StateModel(kv_bytes, state_bytes, large_block),
        parse_memory("--sizes", sizes, trace.num_unique_blocks, trace.block_size * kv_bytes),
        parse_arrivals(arrivals, trace),
        seed,
    )
    with show_progress() as progress:
        result = compare_states(trace, options, jobs, progress)
    json_file, report = files
    publish(lambda: _print_designs(result), (json_file, result.to_rows), (report, lambda: render_states(result)))


def _print_designs(result: StateResult) -> None:
    """Print the rows as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    facts, used = result.trace, result.conditions
    print(
        f"{facts.name}: {counted(facts.num_requests, 'request', ',')}, one after another; a state has"
        f" {used.state_bytes:,} bytes, and K and V of a token {used.kv_bytes:,}"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("memory", "design", "hit", "K and V cached", "states saved", "no room"):
        table.add_column(column, justify="left" if column == "design" else "right")
    for size, rows in rows_by_size(result):
        for row in rows:
            table.add_row(
                size,
                row.design,
                f"{100 * row.hit_rate:.2f} %",
                f"{100 * row.num_cached / max(1, row.num_tokens):.2f} %",
                f"{row.num_saved:,}",
                f"{row.num_without_room:,}",
            )
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def compare_entrances(
    trace: Trace,
    common: tuple[str, str | None, int, str | None],
    times: tuple[float | None, float | None, str | None],
    jobs: int | None,
    files: tuple[Path | None, Path | None],
) -> None:
    """Run all loads, print the results, and write files. common: --sizes, --arrivals, --seed and --host-size.

    times: --prefill-rate, --decode-step and --loads. files: for the rows as JSON, and the report. Raises
    InvalidArgumentError.
    """
    sizes, arrivals, seed, host_size = common
    prefill_rate, decode_step_s, loads = times
    if prefill_rate is None or decode_step_s is None:
        got = {"--prefill-rate": prefill_rate, "--decode-step": decode_step_s}
        lacking = " and no ".join(name for name, value in got.items() if value is None)
        raise InvalidArgumentError(f"--gate: expected --prefill-rate and --decode-step with it, got no {lacking}")
    num_unique = trace.num_unique_blocks
    options = LoadOptions(
        parse_sizes("--sizes", sizes, num_unique),
        ServerModel(prefill_rate, decode_step_s),
        mean_arrival_s=parse_arrivals(arrivals, trace),
        seed=seed,
        host_blocks=None if host_size is None else parse_size("--host-size", host_size, num_unique),
    )
    if loads is not None:
        options = replace(options, loads=_parse_loads(loads))
    with show_progress() as progress:
        result = delays(trace, options, jobs, progress)
    json_file, report = files
    publish(lambda: _print_loads(result), (json_file, result.to_rows), (report, lambda: render_loads(result)))


def _parse_loads(text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise InvalidArgumentError(f"--loads: expected numbers with commas, got {shown(text)}") from None


def _print_loads(result: LoadResult) -> None:
    """Print the rows as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    facts = result.trace
    print(
        f"{facts.name}: {counted(facts.num_requests, 'request', ',')} in {counted(facts.num_sessions, 'session', ',')};"
        " seconds of modelled time"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    heads = ("blocks", "load", "entrance", "delay", "p50", "p99", "ttft p50", "p99", "again", "longest wait", "paused")
    for head in heads:
        table.add_column(head, justify="left" if head == "entrance" else "right")
    for row in result.rows:
        times = row.delay_mean_s, row.delay_p50_s, row.delay_p99_s
        table.add_row(
            f"{row.num_blocks:,}",
            f"{row.load:g}",
            row.entrance,
            *[f"{each:,.1f}" for each in times],
            f"{row.ttft_p50_s:,.2f}",
            f"{row.ttft_p99_s:,.1f}",
            f"{row.recomputed_share:.3f}",
            f"{row.longest_wait_s:,.0f}",
            f"{row.num_paused:,}",
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)
