"""The `kvblocks` command: one typer app, one function for each command.

Torch and other heavy packages are imported inside the commands, so that `kvblocks --help` answers at once. An error
that a user can act on (KVBlocksError) becomes one line on stderr. The exit status is 2 if a value is wrong, whether the
command line or the server finds it, and 1 for all other errors. Results go to stdout, progress to stderr.
"""

import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvblocks import __version__
from kvblocks.arguments import pip_install
from kvblocks.errors import InvalidArgumentError, KVBlocksError

if TYPE_CHECKING:
    from kvblocks.cli.chat import ChatTurn
    from kvblocks.engine.completion import Completion
    from kvblocks.engine.engine import Engine
    from kvblocks.engine.grammar.grammar import Grammar
    from kvblocks.engine.options import OptionValues
    from kvblocks.engine.run.runner import LoadedModel

_NO_ENGINE = f"kvblocks: this command needs the engine: {pip_install('engine')}"

try:
    import typer
except ModuleNotFoundError as _error:
    # The console script imports this module first, so a core-only installation fails here.
    raise SystemExit(f"{_NO_ENGINE} (Python has no module {_error.name!r})") from _error

from kvblocks.cli.bench import bench_commands  # noqa: E402  # these need typer too
from kvblocks.cli.cache import cache_commands  # noqa: E402
from kvblocks.cli.models import (  # noqa: E402
    EvictionOption,
    ModelOption,
    NoPrefixCachingOption,
    NumBlocksOption,
    RememberOption,
    load_model,
    show_progress,
)
from kvblocks.cli.replay import replay_commands  # noqa: E402
from kvblocks.cli.server import server_commands  # noqa: E402
from kvblocks.cli.verify import verify_commands  # noqa: E402

_SERVER_PACKAGES = frozenset({"starlette", "uvicorn", "httptools", "httpx2"})
_NO_REPLAY = f"kvblocks: this command needs some packages: {pip_install('replay')}"
_NO_SERVER = f"kvblocks: this command needs the server: {pip_install('engine,server')}"

app = typer.Typer(
    name="kvblocks",
    help="KV-cache blocks with exact prefix caching for LLM engines, and a reference engine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
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
    """Fetch a model into the user's cache folder, and print the model's folder as the last line.

    The cache folder is $KVBLOCKS_CACHE, or kvblocks/ in $XDG_CACHE_HOME or ~/.cache.
    """
    from kvblocks.engine.model.fetch import fetch_model

    with show_progress() as progress:
        folder = fetch_model(model, progress=progress)
    print(folder)


@app.command()
def models() -> None:
    """List the models that `fetch` knows, and the architectures that the engine can run from a Hugging Face folder."""
    from kvblocks.engine.model.architectures import SUPPORTED_ARCHITECTURES
    from kvblocks.engine.model.fetch import KNOWN_MODELS

    print("Models by name:")
    for name in sorted(KNOWN_MODELS):
        print(f"  {name}")
    print("Architectures of Hugging Face folders:")
    for architecture in SUPPORTED_ARCHITECTURES:
        print(f"  {architecture.name:36}{architecture.parts}".rstrip())


@app.command()
def demo(
    model: ModelOption = "smollm2",
    json: Annotated[
        bool, typer.Option("--json", help="Print the results as one JSON object, and everything else to stderr.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads.")] = 1,
    num_blocks: NumBlocksOption = None,
    no_prefix_caching: NoPrefixCachingOption = False,
    eviction: EvictionOption = None,
) -> None:
    """Answer questions that share a long prompt, without and with prefix caching, and compare. Takes about a minute.

    Then a server is killed and started again, and its first answer comes from the disk. This part needs the extra
    `server`, and is skipped without it.

    With --no-prefix-caching neither engine caches anything, so the comparison shows how much two equal runs differ on
    this machine. The part with the server is skipped, too.

    Torch uses one thread by default. Deterministic results are fastest that way, and other work on the machine disturbs
    the times least.
    """
    from json import dumps

    import torch
    from rich.console import Console

    from kvblocks.engine.demo.demo import DemoCache, run_demo

    torch.set_num_threads(threads)
    console = Console(stderr=json)
    cache = DemoCache(num_blocks, not no_prefix_caching, eviction)
    results = run_demo(load_model(model), console, cache=cache).to_json(model)
    if cache.prefix_caching:
        try:
            from kvblocks.cli.restart import run_restart
        except ModuleNotFoundError as error:
            console.print(f"The last part needs the server: {pip_install('engine,server')}: {error}", markup=False)
        else:
            results["restart"] = run_restart(model, console).to_json()
    if json:
        print(dumps(results))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="A question; for a model without a chat template, a text to continue.")],
    model: ModelOption = "smollm2",
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of each answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the most likely token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of random draws, for a temperature above 0.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Number of answers; all are equal at temperature 0.")] = 1,
    min_p: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Don't draw tokens less likely than this share of the most likely one; 0: all."
        ),
    ] = 0.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Penalty for tokens that the answer already has; 0: none.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Penalty for each occurrence of a token in the answer so far; 0: none.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Penalty for tokens in the prompt or the answer; 1: none.")
    ] = 1.0,
    json_schema: Annotated[
        Path | None,
        typer.Option(help="A file with a JSON schema that the answer must follow. Needs kvblocks\\[structured]."),
    ] = None,
    num_blocks: NumBlocksOption = None,
    no_prefix_caching: NoPrefixCachingOption = False,
    eviction: EvictionOption = None,
    remember_next_token: RememberOption = False,
) -> None:
    """Answer a prompt, and print the text as it comes. Several answers are printed one after another.

    The last line, on stderr, shows the time to first token, the speed, and how much of the prompt was cached.
    """
    from kvblocks.engine.engine import Engine
    from kvblocks.engine.options import OptionValues

    engine = Engine(
        load_model(model),
        num_blocks=num_blocks,
        enable_prefix_caching=not no_prefix_caching,
        eviction=eviction,
        remember_next_token=remember_next_token,
    )
    options = OptionValues(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
    )
    if json_schema is not None:
        options["grammar"] = _compile(json_schema, engine.model)
    tokenizer = engine.model.tokenizer
    is_chat = tokenizer is not None and tokenizer.has_chat_template
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) if tokenizer and is_chat else prompt
    print(_answer(engine, tokens, options), file=sys.stderr)


def _answer(engine: "Engine", prompt: "str | list[int]", options: "OptionValues") -> "ChatTurn":
    """Print the answers to a prompt, and return what they cost together."""
    from time import perf_counter

    from kvblocks.cli.chat import ChatTurn

    number, start_s = options["n"], perf_counter()
    completions: list[Completion | None] = [None] * number
    for piece in engine.stream([prompt], **options):
        if number == 1:
            print(piece.text, end="", flush=True)
        completions[piece.sample_index] = piece.completion or completions[piece.sample_index]
    seconds = perf_counter() - start_s
    whole = [completion for completion in completions if completion is not None]
    for place, completion in enumerate(whole, 1):
        print("" if number == 1 else f"[{place}/{number}]\n{completion.text}")
    return ChatTurn.of(whole, seconds)


def _compile(file: Path, model: "LoadedModel") -> "Grammar":
    """Return the grammar of the JSON schema in a file. Raises InvalidArgumentError."""
    from json import loads

    from kvblocks.engine.grammar.grammar import GrammarCompiler

    try:
        schema = loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"--json-schema: expected a file of JSON, got an error: {error}") from error
    try:
        compiler = GrammarCompiler(model.tokenizer, model.config.vocab_size, sorted(model.stop_token_ids))
        return compiler.json_schema(schema)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"--json-schema: {error}") from error


app.add_typer(server_commands)
app.add_typer(bench_commands)
app.add_typer(replay_commands)
app.add_typer(verify_commands)
app.add_typer(cache_commands, name="cache")


def main(arguments: list[str] | None = None) -> None:
    """Run a command line (default: sys.argv's) and exit with 0: success, 1: error, 2: wrong value, 130: Ctrl-C."""
    # Torch reads this when it first allocates memory. A CPU reads weights on huge pages a few per cent faster.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if isinstance(sys.stdout, TextIOWrapper):  # an answer, or a file's name, may have what its encoding lacks
        sys.stdout.reconfigure(errors="replace")
    try:
        app(args=arguments, prog_name="kvblocks")
    except KVBlocksError as error:
        print(f"kvblocks: {error}", file=sys.stderr)
        sys.exit(2 if _is_wrong_value(error) else 1)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "kvblocks":
            raise  # one of our modules: a bug
        sys.exit(f"{_lacking(error.name, arguments)} (Python has no module {error.name!r})")
    except KeyboardInterrupt:
        sys.exit(130)


def _lacking(module: str, arguments: list[str] | None) -> str:
    """Return what to install for a command that needs a module of another package."""
    if module.partition(".")[0] in _SERVER_PACKAGES:
        return _NO_SERVER
    given = sys.argv[1:] if arguments is None else arguments
    return _NO_REPLAY if given[:1] == ["replay"] else _NO_ENGINE


def _is_wrong_value(error: KVBlocksError) -> bool:
    """Whether the command line has to be changed: kvblocks, or a server (400), says that an argument is wrong."""
    from kvblocks.server.errors import ApiError

    return isinstance(error, InvalidArgumentError) or (isinstance(error, ApiError) and error.status == 400)
