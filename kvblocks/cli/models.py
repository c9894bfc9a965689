"""Models for commands: the option that names a model, loading it, and showing the progress of a download."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from kvblocks.arguments import check_one_of
from kvblocks.cli import completion
from kvblocks.cli.flags import option_of
from kvblocks.retention.policies import NAMED
from kvblocks.server.settings import CacheSettings

if TYPE_CHECKING:
    from kvblocks.engine.model.fetch import Progress
    from kvblocks.engine.run.runner import LoadedModel

ModelOption = Annotated[
    str,
    typer.Option(
        help="smollm2 (fetched if need be), a Hugging Face folder, or a GGUF file.", autocompletion=completion.models
    ),
]
NumBlocksOption = Annotated[int | None, option_of(CacheSettings, "num_blocks")]
RememberOption = Annotated[bool, option_of(CacheSettings, "remember_next_token")]
NoPrefixCachingOption = Annotated[bool, option_of(CacheSettings, "prefix_caching")]


def _check_eviction(name: str | None) -> str | None:
    """Refuse an unknown policy while the command line is read, before anything is loaded."""
    if name is not None:
        check_one_of("--eviction", name, NAMED)
    return name


EvictionOption = Annotated[str | None, option_of(CacheSettings, "eviction", callback=_check_eviction)]


def load_model(model: str, device: str = "auto", dtype: str | None = None) -> "LoadedModel":
    """Load a model for a command, as `Engine` would. A known model is fetched first, with its progress shown."""
    from kvblocks.engine.model.fetch import KNOWN_MODELS, fetch_model
    from kvblocks.engine.run.backends import choose_device
    from kvblocks.engine.run.runner import LoadedModel

    if model in KNOWN_MODELS:
        with show_progress() as progress:
            fetch_model(model, progress=progress)
    return LoadedModel.load(model, choose_device(device), dtype)


_STAGES = {
    "wait": "Waiting for another kvblocks that is fetching this model",
    "download": "Downloading",
    "check": "Checking the digest",
    "convert": "Converting",
}


@contextmanager
def show_progress() -> Iterator["Progress"]:
    """Show the stages of `fetch_model` on stderr: as bars on a terminal, otherwise (in a log) as a line per stage."""
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
