"""`kvblocks serve` and `kvblocks chat`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvblocks.cli.models import (
    CACHE_PANEL,
    EvictionOption,
    ModelOption,
    NoPrefixCachingOption,
    NumBlocksOption,
    load_model,
)

ApiKeyOption = Annotated[
    str | None,
    typer.Option(envvar="KVBLOCKS_API_KEY", help="The server's key. The environment hides it from other users' `ps`."),
]
_CACHE, _TIERS, _WORK, _SERVER, _EVENTS = CACHE_PANEL, "Tiers", "Work", "Server", "Events for routers"

server_commands = typer.Typer()


@server_commands.command()
def serve(
    model: ModelOption = "smollm2",
    block_size: Annotated[int, typer.Option(help="Tokens in a block.", rich_help_panel=_CACHE)] = 16,
    num_blocks: NumBlocksOption = None,
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="Instead of --num-blocks: 2GiB, or 0.5 of what is free.", rich_help_panel=_CACHE)
    ] = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            help="auto, or fp8_e4m3: K and V in 8 bits, so that the pool has room for more.", rich_help_panel=_CACHE
        ),
    ] = "auto",
    no_prefix_caching: NoPrefixCachingOption = False,
    num_history_blocks: Annotated[
        int,
        typer.Option(
            help="Evicted blocks that `kvblocks cache explain` remembers; 0: explain no requests, hash nothing.",
            rich_help_panel=_CACHE,
        ),
    ] = 10_000,
    eviction: EvictionOption = None,
    remember_next_token: Annotated[
        bool,
        typer.Option(
            "--remember-next-token",
            help="Begin the answer to an exact repeat, at temperature 0, without a forward pass.",
            rich_help_panel=_CACHE,
        ),
    ] = False,
    host_cache: Annotated[
        str | None,
        typer.Option(
            help="Memory for blocks that leave the pool: 2GiB, or 0.5 of what is free.", rich_help_panel=_TIERS
        ),
    ] = None,
    disk_cache: Annotated[
        Path | None, typer.Option(help="A folder for blocks, found again after a restart.", rich_help_panel=_TIERS)
    ] = None,
    disk_cache_size: Annotated[
        str | None, typer.Option(help="The most that the folder may take. Default: 8GiB.", rich_help_panel=_TIERS)
    ] = None,
    disk_cache_secret_file: Annotated[
        Path | None,
        typer.Option(
            help="A file of at least 16 bytes that nobody else knows, so that nobody can plant blocks in the folder."
            " Or $KVBLOCKS_DISK_CACHE_SECRET.",
            rich_help_panel=_TIERS,
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            envvar="KVBLOCKS_STORE",
            help="A Valkey or Redis for blocks, which servers share: valkey://host:6379. See docs/store.md. The"
            " environment hides a password from other users' `ps`. Needs kvblocks[valkey].",
            rich_help_panel=_TIERS,
        ),
    ] = None,
    store_secret_file: Annotated[
        Path | None,
        typer.Option(
            help="A file of at least 16 bytes that only the servers of this store know, so that nobody else can plant"
            " blocks there. Or $KVBLOCKS_STORE_SECRET.",
            rich_help_panel=_TIERS,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="The most tokens in a step.", rich_help_panel=_WORK)
    ] = 512,
    max_num_seqs: Annotated[int, typer.Option(help="The most sequences in a step.", rich_help_panel=_WORK)] = 64,
    schedule: Annotated[
        str, typer.Option(help="Who is admitted first: fcfs, longest-prefix or grouped.", rich_help_panel=_WORK)
    ] = "fcfs",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Give equal logits, cached or not.", rich_help_panel=_WORK)
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto.", rich_help_panel=_WORK)] = "auto",
    attention: Annotated[str, typer.Option(help="torch, triton, flash-attn or auto.", rich_help_panel=_WORK)] = "auto",
    warm_up: Annotated[
        bool,
        typer.Option("--warm-up", help="Compile kernels before serving, not during it.", rich_help_panel=_WORK),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, float16 or bfloat16. Default: float32 on a CPU, else the model's.", rich_help_panel=_WORK
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Torch threads. Default: torch's own choice.", rich_help_panel=_WORK)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0: any free one.", rich_help_panel=_SERVER)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="What clients call the model, instead of its folder's name; may be given several times.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_key: ApiKeyOption = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="Instead of --api-key: a file with a key for each tenant; see docs/server.md.", rich_help_panel=_SERVER
        ),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            envvar="KVBLOCKS_ADMIN_KEY",
            help="The operator's key; requests about the cache then need it.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="Instead of --admin-key: a file with that key.", rich_help_panel=_SERVER)
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A host name that requests may use, beside localhost; may be given several times.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    allow_anyone: Annotated[
        bool, typer.Option("--allow-anyone", help="Serve other machines without a key.", rich_help_panel=_SERVER)
    ] = False,
    max_requests: Annotated[
        int, typer.Option(help="The most unfinished answers, waiting ones too; more get 429.", rich_help_panel=_SERVER)
    ] = 256,
    max_body_bytes: Annotated[int, typer.Option(help="Larger bodies get 413.", rich_help_panel=_SERVER)] = 4 * 2**20,
    max_connections: Annotated[
        int, typer.Option(help="The most connections; more are closed with 503.", rich_help_panel=_SERVER)
    ] = 512,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds for a request, waiting included.", rich_help_panel=_SERVER)
    ] = 600.0,
    grace_period: Annotated[
        float, typer.Option(help="Seconds that running requests get after SIGTERM.", rich_help_panel=_SERVER)
    ] = 30.0,
    log_level: Annotated[
        str,
        typer.Option(help="debug, info (each request in a line), warning or error.", rich_help_panel=_SERVER),
    ] = "warning",
    record: Annotated[
        Path | None,
        typer.Option(
            help="A file that gets a line for each request, without its text, for `kvblocks replay`.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    kv_events: Annotated[
        str | None,
        typer.Option(
            help="Publish what is cached, as vLLM does: tcp://127.0.0.1:5557. Needs kvblocks[wire].",
            rich_help_panel=_EVENTS,
        ),
    ] = None,
    kv_replay: Annotated[
        str | None,
        typer.Option(help="Where subscribers ask for missed batches: tcp://127.0.0.1:5558.", rich_help_panel=_EVENTS),
    ] = None,
    kv_topic: Annotated[
        str, typer.Option(help="The topic of each batch, such as kv@NAME@MODEL.", rich_help_panel=_EVENTS)
    ] = "",
    kv_allow_remote: Annotated[
        bool,
        typer.Option(
            "--kv-allow-remote",
            help="Let other machines subscribe: whoever connects reads prompts' tokens.",
            rich_help_panel=_EVENTS,
        ),
    ] = False,
) -> None:
    """Serve a model through OpenAI's API, with prefix caching.

    SIGTERM or Ctrl-C lets running requests finish; a second one doesn't.
    """
    from kvblocks.engine.server import settings
    from kvblocks.engine.server.access.keys_file import read_keys

    environment = None if disk_cache is None else os.environ.get("KVBLOCKS_DISK_CACHE_SECRET")
    store_environment = None if store is None else os.environ.get("KVBLOCKS_STORE_SECRET")
    cache = settings.CacheSettings(
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_memory=None if kv_cache_memory is None else settings.parse_memory(kv_cache_memory),
        kv_cache_dtype=kv_cache_dtype,
        prefix_caching=not no_prefix_caching,
        num_history_blocks=num_history_blocks,
        remember_next_token=remember_next_token,
        schedule=schedule,
        eviction=eviction,
        deterministic=deterministic,
        device=device,
        attention=attention,
        warm_up=warm_up,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        host_cache=None if host_cache is None else settings.parse_memory(host_cache),
        disk_cache=disk_cache,
        disk_cache_size=disk_cache_size,
        disk_cache_secret=settings.read_secret(disk_cache_secret_file, environment, "--disk-cache-secret-file"),
        store=store,
        store_secret=settings.read_secret(store_secret_file, store_environment, "--store-secret-file"),
    )
    server = settings.ServerSettings(
        host=host,
        port=port,
        model_names=tuple(served_model_name or ()),
        api_key=api_key,
        admin_key=settings.read_key(admin_key_file, admin_key, "--admin-key-file"),
        keys=() if keys is None else read_keys(keys),
        allowed_hosts=tuple(allowed_host or ()),
        allow_anyone=allow_anyone,
        max_requests=max_requests,
        max_body_bytes=max_body_bytes,
        max_connections=max_connections,
        request_timeout_s=request_timeout,
        grace_s=grace_period,
        log_level=log_level,
        record=record,
    )
    events = settings.EventSettings(endpoint=kv_events, replay=kv_replay, topic=kv_topic, allow_remote=kv_allow_remote)
    import torch

    from kvblocks.engine.server.run import serve as run_server

    if threads is not None:
        torch.set_num_threads(threads)
    run_server(
        lambda: load_model(model, device, dtype),
        model,
        cache,
        server,
        lambda line: print(line, file=sys.stderr, flush=True),
        events,
    )


@server_commands.command()
def chat(
    url: Annotated[
        str | None, typer.Option(help="A running server, such as http://127.0.0.1:8000. Default: in this process.")
    ] = None,
    model: ModelOption = "smollm2",
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the most likely token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="For a temperature above 0.")] = None,
    salt: Annotated[str | None, typer.Option(help="With --url: share no cached prefix with other salts.")] = None,
    api_key: ApiKeyOption = None,
    num_blocks: NumBlocksOption = None,
    no_prefix_caching: NoPrefixCachingOption = False,
    eviction: EvictionOption = None,
) -> None:
    """Chat, and see what each turn cost: time to first token, speed, and how much of the prompt was cached.

    An empty line or Ctrl-D ends it. The options of the KV cache are for a chat in this process; a server has its own.
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
        )
        answerer = EngineAnswerer(engine, max_tokens=max_tokens, temperature=temperature, seed=seed)
        print(describe_engine(engine))
        run_chat(answerer, terminal.read_lines(), terminal.write, system=system, while_answering=terminal.hold_typing)
        return
    if (num_blocks, no_prefix_caching, eviction) != (None, False, None):
        raise InvalidArgumentError(
            "expected --num-blocks, --no-prefix-caching and --eviction without --url only: a server has its own cache"
        )
    from kvblocks.cli.client import ServerClient

    with ServerClient(url, api_key) as client:
        remote = ServerAnswerer(client, max_tokens=max_tokens, temperature=temperature, seed=seed, salt=salt)
        print(describe_server(client))  # raises at once if there is no server, or another key is needed
        run_chat(remote, terminal.read_lines(), terminal.write, system=system, while_answering=terminal.hold_typing)
