"""The `kvblocks` command: one typer app, one function for each command.

Torch and the other heavy imports happen inside the commands, so that `kvblocks --help` answers at once. Errors that a
user can act on (KVBlocksError) become one line on stderr and exit code 1; results go to stdout, progress to stderr.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from kvblocks.errors import KVBlocksError
from kvblocks.version import __version__

if TYPE_CHECKING:
    from kvblocks.engine.fetch import Progress
    from kvblocks.engine.runner import LoadedModel

_NO_ENGINE = "kvblocks: this command needs the engine: pip install 'kvblocks[engine]'"

try:
    import typer
except ModuleNotFoundError as _error:
    # The console script imports this module first of all, so this is where a core-only installation ends.
    raise SystemExit(f"{_NO_ENGINE} (Python has no module {_error.name!r})") from _error

app = typer.Typer(
    name="kvblocks",
    help="KV-cache blocks with exact prefix caching for LLM engines, and a small reference engine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvblocks {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def fetch(model: Annotated[str, typer.Argument(help="A model that kvblocks knows: smollm2.")] = "smollm2") -> None:
    """Fetch a model into the user's cache, and print its folder as the last line.

    The cache is $KVBLOCKS_CACHE, or kvblocks/ in $XDG_CACHE_HOME or ~/.cache.
    """
    from kvblocks.engine.fetch import fetch_model

    with show_progress() as progress:
        folder = fetch_model(model, progress=progress)
    print(folder)


_ModelOption = Annotated[str, typer.Option(help="smollm2 (fetched if need be), or a Hugging Face folder.")]


@app.command()
def demo(
    model: _ModelOption = "smollm2",
    json: Annotated[
        bool, typer.Option("--json", help="Print the results as one JSON object, the rest to stderr.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads.")] = 1,
) -> None:
    """Answer questions that share a long prompt, without and with prefix caching, and compare. Takes about a minute.

    One torch thread is the default: deterministic results are fastest there, and other work on the machine disturbs
    the times least.
    """
    from json import dumps

    import torch
    from rich.console import Console

    from kvblocks.engine.demo import run_demo

    torch.set_num_threads(threads)
    report = run_demo(_load(model), Console(stderr=json))
    if json:
        print(dumps(report.to_json(model)))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="A question; for a model without a chat template, a text to continue.")],
    model: _ModelOption = "smollm2",
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the most likely token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="For a temperature above 0.")] = None,
    n: Annotated[int, typer.Option(min=1, help="How many answers; they are equal at temperature 0.")] = 1,
) -> None:
    """Answer a prompt, printing the text as it comes; several answers are printed one after another."""
    from kvblocks.engine.engine import Engine

    engine = Engine(_load(model))
    tokenizer = engine.model.tokenizer
    is_chat = tokenizer is not None and tokenizer.has_chat_template
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) if tokenizer and is_chat else prompt
    if n > 1:
        completions = engine.generate([tokens], n=n, max_tokens=max_tokens, temperature=temperature, seed=seed)
        for number, completion in enumerate(completions, 1):
            print(f"[{number}/{n}]\n{completion.text}")
        return
    for piece in engine.stream([tokens], max_tokens=max_tokens, temperature=temperature, seed=seed):
        print(piece.text, end="", flush=True)
    print()


def _load(model: str) -> "LoadedModel":
    """Load a model for a command; a known one is fetched first, which shows its progress."""
    from kvblocks.engine.fetch import KNOWN_MODELS, fetch_model
    from kvblocks.engine.runner import LoadedModel

    if model in KNOWN_MODELS:
        with show_progress() as progress:
            fetch_model(model, progress=progress)
    return LoadedModel.load(model)


_STAGES = {
    "wait": "Waiting for another kvblocks that is fetching this model",
    "download": "Downloading",
    "check": "Checking the digest",
    "convert": "Converting",
}


@contextmanager
def show_progress() -> Iterator["Progress"]:
    """Shows the stages of `fetch_model` on stderr: bars on a terminal, elsewhere (a log) one line for each stage."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def report(stage: str, fraction: float | None) -> None:
            label = _STAGES.get(stage, stage)
            if stage not in tasks:
                tasks[stage] = bars.add_task(label, total=None if fraction is None else 1.0)
                if not console.is_terminal:
                    console.print(label)
            if fraction is not None:
                bars.update(tasks[stage], completed=fraction)

        yield report


def main(arguments: list[str] | None = None) -> None:
    """Run a command line (sys.argv's by default) and exit: 0 if all is well, 1 error, 2 bad usage, 130 Ctrl-C."""
    try:
        app(args=arguments, prog_name="kvblocks")
    except KVBlocksError as error:
        sys.exit(f"kvblocks: {error}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "kvblocks":
            raise  # ours, so a bug
        sys.exit(f"{_NO_ENGINE} (Python has no module {error.name!r})")
    except KeyboardInterrupt:
        sys.exit(130)
