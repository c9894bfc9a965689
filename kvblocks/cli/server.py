"""`kvblocks serve` and `kvblocks chat`."""

import sys
from typing import Annotated

import typer

from kvblocks.cli.flags import option_of, takes_settings
from kvblocks.cli.models import (
    EvictionOption,
    ModelOption,
    NoPrefixCachingOption,
    NumBlocksOption,
    RememberOption,
    load_model,
)
from kvblocks.server.settings import CacheSettings, EventSettings, ServerSettings

ApiKeyOption = Annotated[str | None, option_of(ServerSettings, "api_key")]

server_commands = typer.Typer()


@server_commands.command()
@takes_settings
def serve(
    model: ModelOption = "smollm2",
    *,
    cache: CacheSettings,
    server: ServerSettings,
    events: EventSettings,
) -> None:
    """Serve a model through OpenAI's and Anthropic's APIs, with prefix caching.

    After SIGTERM, Ctrl-C or the end of its terminal, running requests have a grace period to finish. A second signal
    ends them at once.
    """
    from kvblocks.server.run import serve as run_server

    _use_threads(cache.threads)
    run_server(lambda: load_model(model, cache.device, cache.dtype), model, cache, server, _say, events)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _use_threads(threads: int | None) -> None:
    """Set the number of torch's threads. None: torch's own choice."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


@server_commands.command()
def chat(
    url: Annotated[
        str | None,
        typer.Option(help="A running server, such as http://127.0.0.1:8000. Default: run the model in this process."),
    ] = None,
    model: ModelOption = "smollm2",
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of each answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the most likely token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of random draws, for a temperature above 0.")] = None,
    salt: Annotated[
        str | None,
        typer.Option(help="With --url: the cache_salt of this chat, which shares no cached prefix with other salts."),
    ] = None,
    api_key: ApiKeyOption = None,
    num_blocks: NumBlocksOption = None,
    no_prefix_caching: NoPrefixCachingOption = False,
    eviction: EvictionOption = None,
    remember_next_token: RememberOption = False,
) -> None:
    """Chat, and see what each turn cost: time to first token, speed, and how much of the prompt was cached.

    Ctrl-C ends an answer. An empty line or Ctrl-D ends the chat.

    The options of the KV cache, and --model, are for a chat in this process; a server has its own.
    """
    from kvblocks.cli.chat import EngineAnswerer, ServerAnswerer, describe_engine, describe_server
    from kvblocks.cli.chat import chat as run_chat
    from kvblocks.cli.terminal import Terminal
    from kvblocks.errors import InvalidArgumentError

    terminal = Terminal()
    if url is None:
        if salt is not None:
            raise InvalidArgumentError("expected --salt with --url only: a chat in this process shares with nobody")
        from kvblocks.engine.engine import Engine

        engine = Engine(
            load_model(model),
            num_blocks=num_blocks,
            enable_prefix_caching=not no_prefix_caching,
            eviction=eviction,
            remember_next_token=remember_next_token,
        )
        answerer = EngineAnswerer(engine, max_tokens=max_tokens, temperature=temperature, seed=seed)
        print(describe_engine(engine))
        run_chat(answerer, terminal.read_lines(), terminal.write, system=system, while_answering=terminal.answering)
        return
    if (num_blocks, no_prefix_caching, eviction, remember_next_token) != (None, False, None, False):
        raise InvalidArgumentError(
            "expected --num-blocks, --no-prefix-caching, --eviction and --remember-next-token without --url only:"
            " a server has its own cache"
        )
    from kvblocks.cli.client import ServerClient

    with ServerClient(url, api_key) as client:
        remote = ServerAnswerer(client, max_tokens=max_tokens, temperature=temperature, seed=seed, salt=salt)
        print(describe_server(client))  # raises at once if there is no server, or another key is needed
        run_chat(remote, terminal.read_lines(), terminal.write, system=system, while_answering=terminal.answering)
