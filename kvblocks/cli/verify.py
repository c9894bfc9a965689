"""`kvblocks verify`: is the prefix cache of a running server right?"""

import json as json_module
import sys
from pathlib import Path
from typing import Annotated

import typer

verify_commands = typer.Typer()


@verify_commands.command()
def verify(
    url: Annotated[str, typer.Argument(help="Any server with OpenAI's API, such as http://127.0.0.1:8000.")],
    model: Annotated[str | None, typer.Option(help="One of its models. Default: the first.")] = None,
    minutes: Annotated[float, typer.Option(help="When to stop.")] = 5.0,
    max_requests: Annotated[int, typer.Option(min=1, help="When to stop, too.")] = 5000,
    only: Annotated[str | None, typer.Option(help="Run this case alone.")] = None,
    seed: Annotated[str, typer.Option(help="Equal seeds draw equal prompts.")] = "1",
    salts: Annotated[
        bool | None,
        typer.Option(
            "--salts/--no-salts", help="Whether cache_salt must separate. Default: if a wrong one is refused."
        ),
    ] = None,
    cold_url: Annotated[
        str | None, typer.Option(help="A server of the same model that caches nothing, for cold answers.")
    ] = None,
    reset_path: Annotated[
        str | None, typer.Option(help="A path that resets the prefix cache when it is posted to; else none is reset.")
    ] = None,
    flush_prompts: Annotated[
        int, typer.Option(min=0, help="Without salts and resets: so many other prompts displace all that is cached.")
    ] = 0,
    lora_path: Annotated[
        list[str] | None,
        typer.Option(help="Twice: paths of LoRA adapters, which are loaded under one name and unloaded again."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Requests at once, at most.")] = 4,
    api_key: Annotated[str | None, typer.Option(envvar="KVBLOCKS_API_KEY", help="The server's key.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page, too.")] = None,
) -> None:
    """Compare answers from a warm prefix cache with cold ones, for minutes. The status is 1 if something is found.

    It asks for a few tokens at a time, and changes nothing but what is cached. docs/verify.md says what each case
    shows, and what it can't.
    """
    from contextlib import nullcontext

    from kvblocks.verify.server.checkup import Checkup, CheckupOptions
    from kvblocks.verify.server.page import as_html, as_text
    from kvblocks.verify.server.patient import Patient
    from kvblocks.verify.server.target import Target

    options = CheckupOptions(minutes=minutes, max_requests=max_requests, seed=seed, only=only)
    with (
        Target(url, model, api_key=api_key, reset_path=reset_path) as target,
        nullcontext() if cold_url is None else Target(cold_url, model, api_key=api_key) as cold_target,
    ):
        patient = Patient(
            target,
            expects_salts=salts,
            cold_target=cold_target,
            num_flush_prompts=flush_prompts,
            adapter_paths=lora_path or (),
            concurrency=concurrency,
        )
        checkup = Checkup(patient, options)
        checkup.run(lambda text: print(text, file=sys.stderr, flush=True))
    if html is not None:
        html.write_text(as_html(checkup), encoding="utf-8")
    print(json_module.dumps(checkup.as_json(), indent=2) if json else as_text(checkup))
    if checkup.findings:
        raise typer.Exit(1)
