"""`kvblocks cache`: commands that ask a running server about its cache, or change it."""

import json as json_module
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvblocks.arguments import counted
from kvblocks.cli.shown.explained import explain_lines
from kvblocks.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvblocks.cli.client import ServerClient

cache_commands = typer.Typer(
    no_args_is_help=True, help="Ask a running server about its cache, pin prefixes, or reset the cache."
)

_Url = Annotated[str, typer.Option(envvar="KVBLOCKS_URL", help="The server's URL.")]
_URL = "http://127.0.0.1:8000"
_FORGET_S = 90.0  # a deletion may take the server a minute
_Key = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=["KVBLOCKS_ADMIN_KEY", "KVBLOCKS_API_KEY"],
        help="The operator's key, or the server's. Better set in the environment, since `ps` shows options to others.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]
_Text = Annotated[str | None, typer.Argument(help="The text. Or give --file or --tokens.")]
_File = Annotated[Path | None, typer.Option(help="A UTF-8 file with the text.")]
_Tokens = Annotated[str | None, typer.Option(help="Token ids instead of a text: 1,2,3, or @FILE with a JSON list.")]
_Raw = Annotated[bool, typer.Option("--raw", help="The text is a whole prompt, not a part of a chat.")]
_Salt = Annotated[str | None, typer.Option(help="The cache_salt of the requests in question.")]


@cache_commands.command()
def stats(url: _Url = _URL, api_key: _Key = None, json: _Json = False) -> None:
    """Show entries, hit rates, memory, the average time of a lookup, and what each tier holds and has moved."""
    with _client(url, api_key) as client:
        values = _ask(client, "prefix_caching", "GET", "/v1/cache/stats")
    if json:
        print(json_module.dumps(values))
        return
    memory, lookups, pins = values["memory"], values["lookups"], values["pins"]
    mean_s = lookups["mean_s"]
    rows = {
        "prefix caching": "on" if values["prefix_caching"] else "off",
        "entries": f"{values['num_entries']} of {counted(values['num_blocks'], 'block')} of"
        f" {counted(values['block_size'], 'token')}",
        "evicted": counted(values["num_evicted_blocks"], "block"),
        "hit rate": f"{values['hit_rate']:.1%} of {counted(values['num_queried_tokens'], 'token')},"
        f" {values['request_hit_rate']:.1%} of {counted(values['num_queries'], 'request')}",
        "recently": f"{values['recent']['hit_rate']:.1%} of {counted(values['recent']['num_queried_tokens'], 'token')}",
        "memory": f"{_mib(memory['pool_bytes'])}: {_mib(memory['used_bytes'])} in use,"
        f" {_mib(memory['cached_bytes'])} cached",
        "average lookup": "none yet"
        if mean_s is None
        else f"{mean_s * 1e6:.1f} us in {counted(lookups['num_lookups'], 'lookup')}",
        "pins": f"{pins['num_pins']}, holding {pins['num_pinned_blocks']} of"
        f" {counted(pins['num_wanted_blocks'], 'block')}"
        if pins["num_pins"]
        else "none",
        **{f"tier {tier['name']}": _tier_line(tier) for tier in values["tiers"]},
    }
    for name, value in rows.items():
        print(f"{name:<15} {value}")


@cache_commands.command()
def pin(
    text: _Text = None,
    file: _File = None,
    tokens: _Tokens = None,
    raw: _Raw = False,
    description: Annotated[str | None, typer.Option(help="A description, which list-pinned shows.")] = None,
    ttl: Annotated[float | None, typer.Option(help="Seconds until the pin ends. Default: it doesn't end.")] = None,
    priority: Annotated[
        int,
        typer.Option(
            min=0, max=100, help="When blocks are short, pins of lower priority lose theirs first; 100: never."
        ),
    ] = 50,
    warm: Annotated[bool, typer.Option("--warm", help="Compute the prefix now, so that it is held at once.")] = False,
    salt: _Salt = None,
    url: _Url = _URL,
    api_key: _Key = None,
    json: _Json = False,
) -> None:
    """Keep a prefix cached: a system prompt by default, or with --raw any text. Prints the pin's id.

    A pin holds full blocks. A text shorter than one of the server's blocks is refused, and tokens after the last full
    block aren't held. Blocks that aren't cached yet are held as soon as a request computes them, or at once with
    --warm.
    """
    prefix = _prefix(text, file, tokens, "text" if raw else "system")
    options = {"description": description, "ttl_s": ttl, "priority": priority, "cache_salt": salt}
    with _client(url, api_key) as client:
        if warm:
            _ask(client, "prompts", "POST", "/v1/cache/warm", {"prompts": [prefix], "cache_salt": salt})
        entry = _ask(client, "id", "POST", "/v1/cache/pins", {**prefix, **options})
    print(json_module.dumps(entry) if json else _pin_line(entry))


@cache_commands.command()
def unpin(
    pin_id: Annotated[str | None, typer.Argument(help="The pin's id, as list-pinned shows it.")] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Instead of an id: token ids (1,2,3, or @FILE with a JSON list). All pins of them end."),
    ] = None,
    salt: Annotated[str | None, typer.Option(help="With --tokens: the cache_salt that they were pinned for.")] = None,
    url: _Url = _URL,
    api_key: _Key = None,
    json: _Json = False,
) -> None:
    """End a pin, or all pins of some tokens. The prefix stays cached until it is evicted."""
    from urllib.parse import quote

    if (pin_id is None) == (tokens is None) or (pin_id is not None and salt is not None):
        got = "neither" if pin_id is None and tokens is None else "both" if salt is None else "an id with --salt"
        raise InvalidArgumentError(f"expected a pin's id, or --tokens with or without --salt, got {got}")
    if tokens is not None:
        body = {"token_ids": _parse_tokens(tokens), "cache_salt": salt}
        with _client(url, api_key) as client:
            values = _ask(client, "pins", "POST", "/v1/cache/unpin", body)
        print(json_module.dumps(values) if json else "\n".join(f"unpinned {entry['id']}" for entry in values["pins"]))
        return
    assert pin_id is not None
    with _client(url, api_key) as client:
        entry = _ask(client, "id", "DELETE", f"/v1/cache/pins/{quote(pin_id, safe='')}")
    print(json_module.dumps(entry) if json else f"unpinned {entry['id']}")


@cache_commands.command("list-pinned")
def list_pinned(url: _Url = _URL, api_key: _Key = None, json: _Json = False) -> None:
    """List the pins, oldest first."""
    with _client(url, api_key) as client:
        values = _ask(client, "pins", "GET", "/v1/cache/pins")
    if json:
        print(json_module.dumps(values))
        return
    for entry in values["pins"]:
        print(_pin_line(entry))
    if not values["pins"]:
        print("nothing is pinned")


@cache_commands.command()
def hints(
    file: Annotated[Path, typer.Argument(help="A JSON file with an envelope of KV hints. See docs/wire-hints.md.")],
    salt: _Salt = None,
    url: _Url = _URL,
    api_key: _Key = None,
    json: _Json = False,
) -> None:
    """Carry out KV hints: pin, release, expire or prefetch prefixes of one salt. Prints the outcome of each action."""
    text = _read(file)
    try:
        envelope = json_module.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"expected a file of JSON, got {str(file)!r}: {error}") from error
    if not isinstance(envelope, dict):
        raise InvalidArgumentError(f"expected a JSON object in {str(file)!r}, got another value")
    with _client(url, api_key) as client:
        values = _ask(client, "actions", "POST", "/v1/cache/hints", {**envelope, "cache_salt": salt})
    if json:
        print(json_module.dumps(values))
        return
    for action in values["actions"]:
        said = action["payload"]
        numbers = [f"{name} {value}" for name, value in said.items() if name not in ("outcome", "reason")]
        reason = [] if said["reason"] is None else [said["reason"]]
        print(f"{action['action_id']} {action['action_type']}: {'; '.join([said['outcome'], *reason, *numbers])}")


@cache_commands.command()
def reset(url: _Url = _URL, api_key: _Key = None, json: _Json = False) -> None:
    """Remove all that is cached. Pins stay."""
    with _client(url, api_key) as client:
        values = _ask(client, "num_removed_entries", "POST", "/v1/cache/reset", {})
    print(json_module.dumps(values) if json else _removed(values))


@cache_commands.command()
def forget(
    salt: Annotated[str, typer.Option(help="The cache_salt of the requests whose prompts are to be deleted.")],
    url: _Url = _URL,
    api_key: _Key = None,
    json: _Json = False,
) -> None:
    """Delete what is cached under a salt, on the device and in all tiers. Bytes on a disk are overwritten."""
    with _client(url, api_key, timeout_s=_FORGET_S) as client:
        values = _ask(client, "num_removed_entries", "POST", "/v1/cache/forget", {"cache_salt": salt})
    print(json_module.dumps(values) if json else _removed(values))


@cache_commands.command()
def dot(
    max_nodes: Annotated[int, typer.Option(min=1, help="The most nodes to draw; the rest is only counted.")] = 200,
    url: _Url = _URL,
    api_key: _Key = None,
    json: _Json = False,
) -> None:
    """Draw what is cached as a tree of prefixes, for Graphviz: `kvblocks cache dot | dot -Tsvg > cache.svg`."""
    with _client(url, api_key) as client:
        values = _ask(client, "dot", "GET", f"/v1/cache/dot?max_nodes={max_nodes}")
    print(json_module.dumps(values) if json else values["dot"])


@cache_commands.command()
def explain(
    text: _Text = None,
    file: _File = None,
    tokens: _Tokens = None,
    raw: _Raw = False,
    request: Annotated[
        str | None, typer.Option(help="Instead of a prompt: the id of an earlier answer, chatcmpl-...")
    ] = None,
    conversation: Annotated[
        str | None, typer.Option(help="Instead of a prompt: the last request with this prompt_cache_key.")
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="Instead of a prompt: the last request.")] = False,
    system: Annotated[str | None, typer.Option(help="The system prompt before the message.")] = None,
    salt: _Salt = None,
    url: _Url = _URL,
    api_key: _Key = None,
    json: _Json = False,
) -> None:
    """Show why a prompt would miss the cache now, or why an earlier request missed it.

    By default the text is a user's message; with --raw it is a whole prompt. For an earlier request, the command also
    shows where its prompt differs from the one before it in the conversation.
    """
    if request is not None or conversation is not None or last:
        has_more = (
            (text, file, tokens, system) != (None,) * 4 or raw or (request is not None) + bool(conversation) + last > 1
        )
        if has_more:
            raise InvalidArgumentError(
                "expected one of --request, --conversation and --last, without a prompt, since the server knows it;"
                " got more"
            )
        if request is not None and salt is not None:
            raise InvalidArgumentError("--request: expected no --salt with it, since an id names one request, got one")
        body: dict[str, Any] = {
            "request_id": request,
            "prompt_cache_key": conversation,
            "last": last,
            "cache_salt": salt,
        }
    else:
        body = _prefix(text, file, tokens, "text" if raw else "messages")
        if system is not None and "messages" not in body:
            raise InvalidArgumentError("expected --system with a message only, got --raw or --tokens")
        if "messages" in body:
            first = [] if system is None else [{"role": "system", "content": system}]
            body["messages"] = [*first, {"role": "user", "content": body["messages"]}]
        body["cache_salt"] = salt
    with _client(url, api_key) as client:
        values = _ask(client, "prompts", "POST", "/v1/cache/explain", body)
    if json:
        print(json_module.dumps(values))
        return
    for entry in values["prompts"]:
        for line in explain_lines(entry):
            print(line)


@cache_commands.command()
def top(
    sort: Annotated[
        str, typer.Option(help="What to sort by, the largest first: saved, share, held, evicted, pins or requests.")
    ] = "saved",
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show the tables once, and exit.")] = False,
    url: _Url = _URL,
    api_key: _Key = None,
    json: _Json = False,
) -> None:
    """Show hit shares, saved tokens, held blocks, evictions and pins, by tenant and by tier, until Ctrl-C."""
    from kvblocks.cli.shown.top import check_order, show_top

    field = check_order(sort)
    with _client(url, api_key) as client:
        values = partial(_ask, client, "tenants", "GET", "/v1/cache/top")
        show_top(values, field, seconds=seconds, once=once, as_json=json)


@cache_commands.command()
def warm(
    file: Annotated[Path, typer.Argument(help="A file with a prompt a line, as JSON; with --raw, one plain text.")],
    raw: Annotated[bool, typer.Option("--raw", help="Take the whole file as one prompt.")] = False,
    salt: Annotated[str | None, typer.Option(help="The cache_salt of prompts that don't have their own.")] = None,
    url: _Url = _URL,
    api_key: _Key = None,
    json: _Json = False,
) -> None:
    """Have prompts cached before they are needed: load or compute them, without generating.

    Each line is a string, or an object with text, system, messages or token_ids, and optionally a cache_salt.
    """
    from kvblocks.cli.warm import read_prompts, warm_prompts

    prompts = read_prompts(_read(file), raw=raw)
    with _client(url, api_key, timeout_s=3600.0) as client:
        warm_prompts(prompts, lambda body: _ask(client, "prompts", "POST", "/v1/cache/warm", body), salt, json=json)


def _client(url: str, api_key: str | None, *, timeout_s: float = 60.0) -> "ServerClient":
    from kvblocks.cli.client import ServerClient

    return ServerClient(url, api_key, timeout_s=timeout_s)


def _ask(client: "ServerClient", field: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the server's answer. Raises InvalidArgumentError if it lacks `field`: the server is another program."""
    values = client.ask(method, path, body)
    if field not in values:
        raise InvalidArgumentError(f"expected a kvblocks server at {client.url}, got an answer without {field!r}")
    return values


def _removed(values: dict[str, Any]) -> str:
    number = values["num_removed_entries"]
    return f"removed {number} {'entry' if number == 1 else 'entries'}"


def _prefix(text: str | None, file: Path | None, tokens: str | None, kind: str) -> dict[str, Any]:
    """Return the prefix that a command names, as the server takes it. Raises InvalidArgumentError."""
    if (text is not None) + (file is not None) + (tokens is not None) != 1:
        given = {"a text": text, "--file": file, "--tokens": tokens}
        got = " and ".join(name for name, value in given.items() if value is not None)
        raise InvalidArgumentError(f"expected one of a text, --file and --tokens, got {got or 'none of them'}")
    if tokens is not None:
        return {"token_ids": _parse_tokens(tokens)}
    if file is None:
        return {kind: text}
    return {kind: _read(file)}


def _parse_tokens(tokens: str) -> list[int]:
    written = _read(Path(tokens[1:])) if tokens.startswith("@") else f"[{tokens}]"
    try:
        value = json_module.loads(written)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise InvalidArgumentError(
            f"--tokens: expected token ids such as 1,2,3, or @FILE with a JSON list of them, got {tokens!r}"
        )
    return value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgumentError(f"expected a readable file of UTF-8 text, got {str(path)!r}: {why}") from error


def _tier_line(tier: dict[str, Any]) -> str:
    moved, place = tier["num_bytes"], tier["place"] or {}
    line = (
        f"{tier['num_cached_blocks']} of {counted(tier['num_blocks'], 'slot')} used;"
        f" loaded {counted(tier['num_loaded_blocks'], 'block')} ({_mib(moved['load'])}),"
        f" stored {tier['num_stored_blocks']} ({_mib(moved['store'])});"
        f" {tier['num_evicted_blocks']} evicted, {tier['num_dropped_blocks']} dropped,"
        f" {tier['num_failed_blocks']} failed"
    )
    if "is_away" in place:
        state = "unreachable" if place["is_away"] else "reachable"
        return (
            f"{line}; {state}, {counted(place['num_failures'], 'call')} failed, {place['num_skipped']} skipped;"
            f" {counted(place['num_missing_blocks'], 'block')} gone, {place['num_damaged_blocks']} damaged,"
            f" {place['num_refused_blocks']} refused, {place['num_present_blocks']} already there"
        )
    if "num_failed_syncs" in place:
        writes, syncs = counted(place["num_failed_writes"], "write"), counted(place["num_failed_syncs"], "sync")
        return f"{line}; {place['num_damaged_blocks']} damaged, {writes} and {syncs} failed"
    own = ", ".join(f"{name} {value}" for name, value in place.items())
    return f"{line}; {own}" if own else line


def _pin_line(entry: dict[str, Any]) -> str:
    left = entry["expires_in_s"]
    until = "no end" if left is None else f"ends in {left:.0f} s"
    held = f"{entry['num_held_blocks']} of {counted(entry['num_blocks'], 'block')} held"
    if entry["num_held_blocks"] < entry["num_blocks"]:
        held += " (the rest once a request computes it; see --warm)"
    line = f"{entry['id']}  {counted(entry['num_tokens'], 'token')}, {held}, priority {entry['priority']}, {until}"
    return f"{line}  {entry['description']}".rstrip()


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
