"""Models for commands: the option that names a model, loading it, and showing the progress of a download."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvblocks.engine.model.fetch import Progress
    from kvblocks.engine.run.runner import LoadedModel

CACHE_PANEL = "KV cache"

ModelOption = Annotated[str, typer.Option(help="smollm2 (fetched if need be), or a Hugging Face folder.")]
NumBlocksOption = Annotated[
    int | None, typer.Option(help="Blocks in the pool. Default: as many as 512 MB hold.", rich_help_panel=CACHE_PANEL)
]
NoPrefixCachingOption = Annotated[
    bool, typer.Option("--no-prefix-caching", help="Compute every prompt in full.", rich_help_panel=CACHE_PANEL)
]
EvictionOption = Annotated[
    str | None,
    typer.Option(
        help="Which cached block goes first: lru, slru, s3fifo, or sessions, which goes by prompt_cache_key."
        " Default: the least recently used. See docs/policies.md.",
        rich_help_panel=CACHE_PANEL,
    ),
]


def load_model(model: str, device: str = "auto", dtype: str | None = None) -> "LoadedModel":
    """Load a model for a command, as `Engine` would. A known model is fetched first, with its progress shown."""
    from kvblocks.engine.engine import choose_device
    from kvblocks.engine.model.fetch import KNOWN_MODELS, fetch_model
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
    """Show the stages of `fetch_model` on stderr: as bars on a terminal, otherwise (a log) a line for each stage."""
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
