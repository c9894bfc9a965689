"""`kvblocks bench`: how fast it is here. The benches are those of the repository's folder bench/.

They import each other as `bench.…`, a name that a wheel must not take. A wheel therefore has them in kvblocks/bench,
and they get their name here, in the process that runs them.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from runpy import run_module
from typing import Annotated

import typer

from kvblocks.errors import InvalidArgumentError

BENCHES = {
    "micro": "bench.core.micro",
    "prefix-cache": "bench.core.prefix_cache",
    "serving": "bench.serving.serving",
}

bench_commands = typer.Typer()


@bench_commands.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    which: Annotated[
        str, typer.Argument(help="micro: the manager's calls. prefix-cache: `PrefixCache`. serving: a server.")
    ],
) -> None:
    """Measure the manager's calls, `PrefixCache`, or a server with and without prefix caching, on this machine.

    Options after the name belong to the bench, such as --quick; `kvblocks bench serving -- --help` lists them. The exit
    status of prefix-cache and serving is 1 if a target is missed. serving needs the extras `engine` and `server`, and
    fetches SmolLM2 unless --model names another model.
    """
    if which not in BENCHES:
        raise InvalidArgumentError(f"bench: expected one of {', '.join(BENCHES)}, got {which!r}")
    _find_benches()
    status = run_module(BENCHES[which])["main"](context.args)
    if status:
        raise typer.Exit(status)


def _find_benches() -> None:
    """Import the package `bench`: that of a wheel, or of the checkout that this file is in."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "bench", package.parent / "bench"):
        spec = spec_from_file_location("bench", folder / "__init__.py", submodule_search_locations=[str(folder)])
        if spec is not None and spec.loader is not None and (folder / "serving" / "serving.py").is_file():
            sys.modules["bench"] = module = module_from_spec(spec)
            spec.loader.exec_module(module)
            return
    raise InvalidArgumentError(f"bench: expected the benches in {package / 'bench'}, got none")
