"""`kvblocks replay`: traces through the production manager. Needs no torch."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvblocks.arguments import counted
from kvblocks.cli.replay.files import check_can_write, check_differ
from kvblocks.cli.replay.output import publish, show_progress
from kvblocks.errors import InvalidArgumentError
from kvblocks.retention.policies import NAMED

if TYPE_CHECKING:
    from kvblocks.replay.result import Result

_TRACE, _MODEL, _OUTPUT = "Trace", "Model", "Output"
_STATES, _SERVED = "Recurrent states", "A server that takes time"

_ALL_POLICIES = ",".join(NAMED)

replay_commands = typer.Typer()


@replay_commands.command()
def replay(
    trace: Annotated[
        str | None,
        typer.Argument(
            help="A file in Mooncake's format, kvblocks' own, or of agents' sessions, also .gz. Default: a sample.",
            show_default=False,
        ),
    ] = None,
    sizes: Annotated[
        str,
        typer.Option(
            help="Sizes of the pool, separated by commas: blocks (5000), or shares of the trace's unique blocks (2%)."
        ),
    ] = "1%,2%,5%,10%,20%",
    policies: Annotated[
        str, typer.Option(help=f"Eviction policies, separated by commas: {', '.join(NAMED)}, lru-drop.")
    ] = _ALL_POLICIES,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens in a block: a multiple of the trace's. Default: the trace's.", rich_help_panel=_TRACE
        ),
    ] = None,
    sessions: Annotated[
        str | None, typer.Option(help="FROM:TO: only these sessions, counted from 0.", rich_help_panel=_TRACE)
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="When sessions begin: 'recorded', or at random, this many seconds apart on average. Default: recorded,"
            " or 60 if the trace doesn't say when they begin.",
            rich_help_panel=_TRACE,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random arrivals.", rich_help_panel=_TRACE)] = 1,
    decode_time: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds for each token of an answer, if the trace doesn't say how long requests ran.",
            rich_help_panel=_TRACE,
        ),
    ] = 0.0,
    closed_loop: Annotated[
        bool,
        typer.Option(
            "--closed-loop",
            help="Count the time before a request from the modelled end of its session's previous request.",
            rich_help_panel=_MODEL,
        ),
    ] = False,
    session_ends: Annotated[
        bool,
        typer.Option(
            "--session-ends", help="Tell the policy when a session's last request has ended.", rich_help_panel=_MODEL
        ),
    ] = False,
    host_size: Annotated[
        str | None, typer.Option(help="Size of a host tier below the pool, as in --sizes.", rich_help_panel=_MODEL)
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            help="Replay with a model's groups of layers: gemma3-4b. Default: one group with full attention.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    state_bytes: Annotated[
        str | None,
        typer.Option(
            help="Compare ways to keep recurrent states, with the same memory. The value is the bytes of one sequence's"
            " state, such as 39.5MB. --sizes then takes bytes, too: 60GB.",
            rich_help_panel=_STATES,
        ),
    ] = None,
    kv_bytes: Annotated[
        str | None,
        typer.Option(
            help="Bytes of K and V of one token, in all layers. Needed with --state-bytes.", rich_help_panel=_STATES
        ),
    ] = None,
    large_block: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Also compare large blocks of this many tokens, as in engines whose blocks hold a layer's state.",
            rich_help_panel=_STATES,
        ),
    ] = None,
    gate: Annotated[
        bool,
        typer.Option(
            "--gate",
            help="Compare no gate, caps on sessions, a session gate and an infinite cache, on a server that takes time."
            " Needs --prefill-rate and --decode-step.",
            rich_help_panel=_SERVED,
        ),
    ] = False,
    prefill_rate: Annotated[
        float | None, typer.Option(help="Prompt tokens that the server computes in a second.", rich_help_panel=_SERVED)
    ] = None,
    decode_step: Annotated[
        float | None, typer.Option(help="Seconds that a step without prompt tokens takes.", rich_help_panel=_SERVED)
    ] = None,
    loads: Annotated[
        str | None,
        typer.Option(
            help="Loads, separated by commas: factors that divide the times between sessions. Default:"
            " 0.25,0.5,0.75,1,1.5.",
            rich_help_panel=_SERVED,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Leave out the columns 'attainable' and 'one order'.", rich_help_panel=_OUTPUT),
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Parallel processes. Default: one for each core.", rich_help_panel=_OUTPUT)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="A file to write the rows to, as JSON.", rich_help_panel=_OUTPUT)
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="A file to write a report to: one HTML file, with pictures and tables.", rich_help_panel=_OUTPUT
        ),
    ] = None,
) -> None:
    """Replay a trace of requests through the production cache, and compare eviction policies and pool sizes.

    Time is modelled: nothing is computed, and no GPU or model is needed.
    """
    from kvblocks.replay.options import parse_arrivals, parse_range, parse_size, parse_sizes
    from kvblocks.replay.readers import read_trace
    from kvblocks.replay.report import render_report
    from kvblocks.replay.sample import SAMPLE
    from kvblocks.replay.sweep import SweepOptions, sweep

    check_can_write(json_file, "--json")
    check_can_write(report, "--report")
    path = SAMPLE if trace is None else Path(trace)
    check_differ({"TRACE": path, "--json": json_file, "--report": report})
    try:
        read = read_trace(path, block_size)
    except OSError as error:
        raise InvalidArgumentError(f"TRACE: expected a file that can be read, got {trace}: {error.strerror}") from error
    if sessions is not None:
        read = read.take_sessions(*parse_range(sessions))
    read = read.with_durations(decode_time)
    num_unique = read.num_unique_blocks
    others: dict[str, object] = {
        "--policies": policies != _ALL_POLICIES,
        "--closed-loop": closed_loop,
        "--session-ends": session_ends,
    }
    others |= {"--groups": groups, "--quick": quick}
    if state_bytes is not None or kv_bytes is not None or large_block is not None:
        _check_absent("--state-bytes", {**others, "--host-size": host_size, "--gate": gate})
        from kvblocks.cli.replay.comparisons import compare_designs

        compare_designs(read, (sizes, arrivals, seed), (state_bytes, kv_bytes, large_block), jobs, (json_file, report))
        return
    if gate or prefill_rate is not None or decode_step is not None or loads is not None:
        from kvblocks.cli.replay.comparisons import compare_entrances

        if not gate:
            raise InvalidArgumentError("expected --gate with --prefill-rate, --decode-step and --loads, got none")
        _check_absent("--gate", others)
        common = (sizes, arrivals, seed, host_size)
        compare_entrances(read, common, (prefill_rate, decode_step, loads), jobs, (json_file, report))
        return
    options = SweepOptions(
        policies=tuple(dict.fromkeys(name.strip() for name in policies.split(","))),
        sizes=parse_sizes("--sizes", sizes, num_unique),
        mean_arrival_s=parse_arrivals(arrivals, read),
        seed=seed,
        is_closed=closed_loop,
        host_blocks=None if host_size is None else parse_size("--host-size", host_size, num_unique),
        groups=groups,
        optima=not quick,
        tells_ends=session_ends,
    )
    with show_progress() as progress:
        result = sweep(read, options, jobs, progress)
    publish(lambda: _print(result), (json_file, result.to_rows), (report, lambda: render_report(result)))


def _check_absent(option: str, others: dict[str, object]) -> None:
    """Raise InvalidArgumentError if `option` came with another that has no effect with it.

    others: their values by name. One that wasn't given has a false value.
    """
    got = [name for name, value in others.items() if value]
    if got:
        raise InvalidArgumentError(f"{option}: expected none of {', '.join(others)} with it, got {' and '.join(got)}")


def _print(result: "Result") -> None:
    """Print the rows as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    facts = result.trace
    print(
        f"{facts.name}: {counted(facts.num_requests, 'request', ',')} in {counted(facts.num_sessions, 'session', ',')},"
        f" {counted(facts.num_references, 'reference', ',')} to {counted(facts.num_unique_blocks, 'block', ',')} of"
        f" {counted(facts.block_size, 'token')};"
        f" an infinite cache hits {facts.infinite_hit_rate:.3f}"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("blocks", "share", "policy", "hit rate", "attainable", "bound", "one order", "waited", "refused"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in result.rows:
        fixed = row.fixed_order
        table.add_row(
            f"{row.num_blocks:,}",
            f"{row.share:.1%}",
            row.policy,
            f"{row.hit_rate:.3f}",
            "" if row.attainable is None else f"{row.attainable:.3f}",
            f"{row.bound:.3f}",
            "" if fixed is None else f"{fixed.hit_rate:.3f}",
            f"{row.waits.count:,}",
            f"{row.waits.refused:,}",
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)
