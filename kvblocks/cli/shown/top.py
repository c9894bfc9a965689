"""`kvblocks cache top`: a live table of tenants and tiers."""

import json
import time
from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from kvblocks.errors import InvalidArgumentError

Json = dict[str, Any]

ORDERS = {
    "saved": "num_cached_tokens",
    "share": "hit_share",
    "held": "num_held_blocks",
    "evicted": "num_evicted_blocks",
    "pins": "num_pinned_blocks",
    "requests": "num_requests",
}
"""What tenants can be sorted by, the largest first."""


def check_order(name: str) -> str:
    """Return the field to sort by. Raises InvalidArgumentError."""
    if name not in ORDERS:
        raise InvalidArgumentError(f"--sort: expected one of {', '.join(ORDERS)}, got {name!r}")
    return ORDERS[name]


def show_top(ask: Callable[[], Json], field: str, *, seconds: float, once: bool, as_json: bool) -> None:
    """Show a table, and update it every so many seconds until Ctrl-C.

    once: show it only once. as_json: a line of JSON instead.
    """
    console = Console()
    if once or as_json or not console.is_terminal:
        while True:
            values = sort(ask(), field)
            if as_json:
                print(json.dumps(values), flush=True)
            else:
                console.print(tables(values, None))
            if once:
                return
            time.sleep(seconds)
    before, values = None, sort(ask(), field)
    with Live(tables(values, before), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(seconds)
            before, values = values, sort(ask(), field)
            live.update(tables(values, before), refresh=True)


def sort(values: Json, field: str) -> Json:
    """Return the server's answer with its tenants as a list, those with the most of a field first."""
    rows = [{"tenant": name, **row} for name, row in values["tenants"].items()]
    return {**values, "tenants": sorted(rows, key=lambda row: (-row[field], row["tenant"]))}


def tables(values: Json, before: Json | None) -> Group:
    """Return the tables of tenants and of tiers. before: earlier values, for what was saved per second; None: none."""
    tenants = _table(
        "tenant",
        *("requests", "hit\nshare", "tokens\nsaved", "saved a\nsecond", "blocks\nheld", "quota", "evicted", "pinned"),
        "from",
    )
    for row in values["tenants"]:
        sources = [f"{tier} {number}" for tier, number in row["num_cached_tokens_by_tier"].items() if number]
        tenants.add_row(
            row["tenant"] or "(no tenant)",
            str(row["num_requests"]),
            f"{row['hit_share']:.1%}",
            str(row["num_cached_tokens"]),
            _rate(row, values, before),
            str(row["num_held_blocks"]),
            "-" if row["quota_blocks"] is None else str(row["quota_blocks"]),
            str(row["num_evicted_blocks"]),
            str(row["num_pinned_blocks"]),
            ", ".join(sources) or "-",
        )
    tiers = _table("tier", "blocks held", "of", "loaded", "stored", "evicted", "pinned")
    device = values["device"]
    numbers = (device["num_entries"], device["num_blocks"], "-", "-", device["num_evicted_blocks"])
    tiers.add_row("device", *map(str, numbers), str(device["num_pinned_blocks"]))
    for tier in values["tiers"]:
        fields = ("num_cached_blocks", "num_blocks", "num_loaded_blocks", "num_stored_blocks", "num_evicted_blocks")
        tiers.add_row(tier["name"], *[str(tier[name]) for name in fields], "-")
    return Group(tenants, tiers)


def _table(first: str, *others: str) -> Table:
    """Return a table whose numbers aren't cut in 80 columns, which a file or a pipe gets, too."""
    table = Table(title=f"{first}s", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in (first, *others):
        is_number = name not in {first, "from"}
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    return table


def _rate(row: Json, values: Json, before: Json | None) -> str:
    if before is None or values["time"] <= before["time"]:
        return "-"
    old = next((one["num_cached_tokens"] for one in before["tenants"] if one["tenant"] == row["tenant"]), 0)
    return f"{(row['num_cached_tokens'] - old) / (values['time'] - before['time']):.0f}"
