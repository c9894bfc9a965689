"""`kvblocks verify`: is the prefix cache of a running server right?"""

import json as json_module
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from kvblocks.arguments import wrong

verify_commands = typer.Typer()


@verify_commands.command()
def verify(
    url: Annotated[str, typer.Argument(help="A server with OpenAI's API, such as http://127.0.0.1:8000.")],
    model: Annotated[
        str | None, typer.Option(help="The model to ask. Default: the first that the server lists.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Stop after this many minutes, whatever the server does.")] = 5.0,
    max_requests: Annotated[int, typer.Option(min=1, help="Stop after this many requests, if that is sooner.")] = 5000,
    only: Annotated[
        str | None, typer.Option(help="Run only this case, such as repeats. docs/verify.md lists them.")
    ] = None,
    seed: Annotated[str, typer.Option(help="A text. Equal seeds draw equal prompts.")] = "1",
    salts: Annotated[
        bool | None,
        typer.Option(
            "--salts/--no-salts",
            help="Whether requests with different cache_salts must share nothing. Default: test whether the server"
            " knows the field.",
        ),
    ] = None,
    cold_url: Annotated[
        str | None, typer.Option(help="A second server of the same model, without prefix caching, for cold answers.")
    ] = None,
    reset_path: Annotated[
        str | None,
        typer.Option(help="A path to POST to that resets the prefix cache, for cold answers. Default: never reset it."),
    ] = None,
    flush_prompts: Annotated[
        int,
        typer.Option(
            min=0, help="Without salts and resets: how many other prompts to send to evict all that is cached."
        ),
    ] = 0,
    lora_path: Annotated[
        list[str] | None,
        typer.Option(
            help="The path of a LoRA adapter on the server; give two. They are loaded under one name, and unloaded."
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="The most requests at once.")] = 4,
    api_key: Annotated[str | None, typer.Option(envvar="KVBLOCKS_API_KEY", help="The server's API key.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write the report as an HTML file.")] = None,
) -> None:
    """Check a server's prefix cache: compare answers from a warm cache with cold ones. Takes five minutes by default.

    Each request asks for a few tokens, and changes nothing but what is cached. The exit status is 1 if a fault is
    found. docs/verify.md says what each case shows, and what it can't.
    """
    from contextlib import nullcontext

    from kvblocks.cli.replay.files import check_can_write
    from kvblocks.verify.server.checkup import Checkup, CheckupOptions
    from kvblocks.verify.server.page import as_html, as_text
    from kvblocks.verify.server.patient import Patient
    from kvblocks.verify.server.target import Target

    if not minutes > 0:
        raise wrong("--minutes", "more than 0", minutes)
    end_s = time.monotonic() + 60 * minutes
    check_can_write(html, "--html")
    options = CheckupOptions(max_requests=max_requests, seed=seed, only=only)
    with (
        Target(url, model, api_key=api_key, end_s=end_s, reset_path=reset_path) as target,
        nullcontext() if cold_url is None else Target(cold_url, model, api_key=api_key, end_s=end_s) as cold_target,
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
        html.write_text(as_html(checkup), encoding="utf-8", errors="replace")
    print(json_module.dumps(checkup.as_json(), indent=2) if json else as_text(checkup))
    if checkup.findings:
        raise typer.Exit(1)
