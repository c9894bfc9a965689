"""What the commands that replay share: progress on a terminal, and the files that they write."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvblocks.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvblocks.replay.sweep import Progress, ReplayJob


def publish(
    show: Callable[[], object],
    rows: tuple[Path | None, Callable[[], object]],
    report: tuple[Path | None, Callable[[], str]],
) -> None:
    """Write rows as JSON and a report, where files are named, and show the results.

    The files come first, because the table's reader may be gone. If one file can't be written, the others still are.
    """
    json_file, make_rows = rows
    report_file, make_report = report
    with ExitStack() as left:
        left.callback(show)
        if report_file is not None:
            left.callback(_write, report_file, make_report)
        if json_file is not None:
            left.callback(_write, json_file, lambda: json.dumps(make_rows(), indent=1) + "\n")


def _write(path: Path, make_text: Callable[[], str]) -> None:
    """Write a whole file, or nothing."""
    part = path.with_name(f".{os.getpid()}.part")
    try:
        try:
            part.write_text(make_text(), encoding="utf-8", errors="replace")  # a file name may be invalid Unicode
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InvalidArgumentError(f"expected to write {path}, got {error.strerror}") from error


@contextmanager
def show_progress() -> Iterator["Progress"]:
    """Show a bar for each job, if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    tasks: dict[ReplayJob, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def report(jobs: list[tuple["ReplayJob", float]]) -> None:
            for job, share in jobs:
                if share and job not in tasks:
                    tasks[job] = bars.add_task(job.title, total=1.0)
                if share:
                    bars.update(tasks[job], completed=share)

        yield report
