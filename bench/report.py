"""Writes the tables of bench/README.md from the results kept in bench/results/.

    python -m bench.report

Reads compare-, growth- and prefix-cache-, each with plain.json and compiled.json; and serving.json, sampling.json,
engine-cpu.json and hybrid.json. "n/a": the contestant has no such thing, or isn't timed on it.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.core.items import BASELINE, ITEMS, TARGETS
from bench.serving.rows import COST_ROWS, shown_rows

BENCH = Path(__file__).resolve().parent
PAGE = BENCH / "README.md"
BEGIN, END = "<!-- tables: python -m bench.report -->", "<!-- end of tables -->"
BUILDS = ("plain", "compiled")
PEERS = ("vllm", "sglang", "dynamo", "nano-vllm")
Results = dict[str, Any]


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return a table in Markdown, numbers to the right."""
    names = list(head)
    align = ["---" if column == 0 else "---:" for column in range(len(names))]
    return [f"| {' | '.join(str(cell) for cell in row)} |" for row in (names, align, *rows)] + [""]


def number(value: float | None) -> str:
    """Return a measured number with three significant digits, or n/a."""
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def first_row(results: Results, item: str, contestant: str) -> Results:
    """Return the contestant's first row for an item; empty when there is none."""
    rows = (row for row in results["results"] if row["item"] == item and row["contestant"] == contestant)
    return next(rows, {})


def targets(compared: dict[str, Results]) -> list[str]:
    """Return how the targets against vLLM were met, by build."""
    titles = {item.name: item.title for item in ITEMS}
    rows = []
    for target in TARGETS:
        cells: list[object] = [titles[target.name]]
        for build, wanted in zip(BUILDS, (target.plain, target.compiled), strict=True):
            ratio = first_row(compared[build], target.name, BASELINE)["ratio"]
            cells += [f"{wanted:g}x", f"{ratio:.1f}x" if ratio >= wanted else f"**{ratio:.1f}x**"]
        rows.append(cells)
    return table(["times vLLM (bold: missed)", "target, plain", "plain", "target, compiled", "compiled"], rows)


def items(compared: dict[str, Results]) -> list[str]:
    """Return the minimum of every contestant for every item."""
    rows = []
    for item in ITEMS:
        ours = [first_row(compared[build], item.name, "kvblocks").get("low") for build in BUILDS]
        theirs = [first_row(compared["plain"], item.name, peer).get("low") for peer in PEERS]
        rows.append([item.title, item.unit, *map(number, (*ours, *theirs))])
    return table(["item", "unit", *(f"kvblocks, {build}" for build in BUILDS), *PEERS], rows)


def memory(compared: dict[str, Results]) -> list[str]:
    """Return the bytes per block."""
    found = {("kvblocks, " + build): compared[build]["memory"][0] for build in BUILDS}
    found |= {row["contestant"]: row for row in compared["plain"]["memory"][1:]}
    rows = ([name, row["empty"], row["cached"], row["share"]] for name, row in found.items())
    return table(["bytes a block", "empty", "all cached", "of vLLM's"], rows)


def growth(grown: dict[str, Results]) -> list[str]:
    """Return what changes with the pool's size, the number of prefixes, and the prompt's length."""
    by_shape: dict[tuple[str, str], list[object]] = {}
    shapes: dict[tuple[int, int], None] = {}
    for build in BUILDS:
        for row in grown[build]["growth"]["pools"]:
            shapes[row["pool_blocks"], row["num_prefixes"]] = None
            by_shape.setdefault((f"{row['item']}, {build}", row["unit"]), []).append(number(row["min"]))
    head = [f"{num_blocks:,} blocks, {num_prefixes:,} prefixes" for num_blocks, num_prefixes in shapes]
    lines = table(["item", "unit", *head], ([*name, *cells] for name, cells in by_shape.items()))
    pairs = zip(*(grown[build]["growth"]["prompts"] for build in BUILDS), strict=True)
    rows = [[a["item"], *(number(x) for row in (a, b) for x in (row["min"], row["ns_per_block"]))] for a, b in pairs]
    head = [f"{build}, {unit}" for build in BUILDS for unit in ("us", "ns/block")]
    return lines + table(["prompt in a buffer", *head], rows)


def prefix_cache(timed: dict[str, Results]) -> list[str]:
    """Return the times of `PrefixCache` and its targets."""
    head = ["item", "unit", "target", *(f"{build}, {kind}" for build in BUILDS for kind in ("min", "median"))]
    rows = []
    for plain, compiled in zip(*(timed[build]["results"] for build in BUILDS), strict=True):
        target = "" if plain["target"] is None else f"under {plain['target']:g}"
        cells = [number(row[kind]) for row in (plain, compiled) for kind in ("min", "median")]
        rows.append([plain["item"], plain["unit"], target, *cells])
    facts = [timed[build]["conditions"] for build in BUILDS]
    on = [
        f"- {build} run: {one['cpu']}, {one['num_cpus']} CPUs, load {one['load_average']}"
        for build, one in zip(BUILDS, facts, strict=True)
    ]
    return [*on, "", *table(head, rows)]


def serving(results: Results) -> list[str]:
    """Return what clients of a server saw without and with caching, with one table per workload, and the conditions."""
    facts = results["conditions"]
    names = (
        "model",
        "weights",
        "device",
        "cpu",
        "num_cpus",
        "threads",
        "load_average",
        "cpu_scale",
        "max_tokens",
        "mode",
    )
    lines = [*(f"- {name}: {facts[name]}" for name in names), ""]
    for row in results["results"]:
        rows = []
        for key, title, unit, _ in shown_rows(row):
            share = key in {"hit_rate", "saved"}
            cells = [f"{row[name][key]:.1%}" if share else number(row[name][key]) for name in ("without", "with")]
            ratio = f"{row['ratios'][key]:.2f}" if key in row["ratios"] else ""
            rows.append([f"{title}, {unit}" if unit else title, *cells, ratio])
        lines += [f"{row['workload'].capitalize()}: {row['about']}.", ""]
        lines += [*table(["", "without", "with", "times better"], rows), *met(row)]
    return lines + costs(results["costs"])


def costs(rows: Iterable[Results]) -> list[str]:
    """Return the cost of caching where nothing can be shared, with one row per run."""
    rows = list(rows)
    head = [
        "nothing to share",
        *(title for _, title in COST_ROWS),
        "time, with / without",
        "outside of the model, us a step",
    ]
    body = []
    for row in rows:
        counts = [f"{row['without'][key]:,}; {row['with'][key]:,}" for key, _ in COST_ROWS]
        time = f"{row['ratio']:.3f} ({row['ratio_least']:.3f} to {row['ratio_most']:.3f})"
        outside = "; ".join(number(row[name]["outside_us_per_step"]) for name in ("without", "with"))
        body.append([row["run"], *counts, time, f"{outside}: {row['loss_outside']:+.2%} of the whole"])
    about = "Requests that share nothing, without caching; with it. Counts are sums over all rounds."
    lines = [f"{about} The ratio of times is the median of the rounds' ratios, with the least and the greatest.", ""]
    lines += table(head, body)
    for row in rows:
        lines += [f"{row['run'].capitalize()}: {row['about']}; {row['num_rounds']} rounds.", "", *met(row)]
    return lines


def met(row: Results) -> list[str]:
    """Return which targets a row of serving met."""
    return [f"- {'met' if is_met else '**missed**'}: {name}" for name, is_met in row["targets"].items()] + [""]


def groups(hybrid: Results) -> list[str]:
    """Return what a hybrid model hits and holds, with and without groups, and the conditions."""
    said = hybrid["conditions"]
    about = f"Trace: {said['trace']}, {said['num_requests']:,} requests."
    about += f" Window {said['window']}, blocks of {said['block_size']} tokens."
    head = ["same bytes", "manager", "blocks", "hit rate", "limited by a window", "bytes held a token"]
    rows = []
    for row in hybrid["results"]:
        rates = [f"{row[rate]:.3f}" for rate in ("hit_rate", "limited_rate")]
        size = f"{row['gib']:g} GiB"
        held = f"{row['bytes_per_token']:,.0f}"
        rows.append([size, row["manager"], f"{row['num_blocks']:,}", *rates, held])
    return [about, "", *table(head, rows)]


def sampling(results: Results) -> list[str]:
    """Return the time of drawing a step's tokens, by shape, and the conditions."""
    facts = results["conditions"]
    names = ("cpu", "num_cpus", "threads", "load_average", "clock", "logits")
    head = ["a step of", "rows x vocabulary", "min ms", "median", "max", "sorted", "target"]
    rows = []
    for row in results["results"]:
        times = [number(row[name]) for name in ("min_ms", "median_ms", "max_ms")]
        target = "" if row["target_ms"] is None else f"{row['target_ms']:g}"
        rows.append([row["item"], f"{row['rows']} x {row['vocabulary']:,}", *times, f"{row['sorted']:.0%}", target])
    return [*(f"- {name}: {facts[name]}" for name in names), "", *table(head, rows)]


def engine_cpu(results: Results) -> list[str]:
    """Return the engines' tokens per CPU second, by clients and phase, and the conditions."""
    facts = results["conditions"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    names = ("cpu", "num_cpus", "threads", "load_average", "clock", "num_rounds", "torch")
    head = ["engine", "clients", "phase", "least", "median", "most", "ratio of medians"]
    rows = []
    for row in results["results"]:
        rates = [number(row[name]) for name in ("least", "median", "most", "ratio")]
        rows.append([row["engine"], str(row["clients"]), row["phase"], *rates])
    return [*(f"- {name}: {facts[name]}" for name in names), f"- versions: {versions}", "", *table(head, rows)]


def conditions(compared: dict[str, Results]) -> list[str]:
    """Return the conditions of both runs, with equal ones only once."""
    both = [compared[build]["conditions"] for build in BUILDS]
    lines = []
    for name, value in both[0].items():
        said = value if value == both[1].get(name) else f"{value} (plain run), {both[1].get(name)} (compiled run)"
        said = ", ".join(f"{key} {version}" for key, version in said.items()) if isinstance(said, dict) else said
        lines.append(f"- {name}: {said}")
    return [*lines, ""]


def load(kind: str) -> dict[str, Results]:
    """Return the kept results of one kind, by build."""
    folder = BENCH / "results"
    return {build: json.loads((folder / f"{kind}-{build}.json").read_text(encoding="utf-8")) for build in BUILDS}


def render(page: str) -> str:
    """Return `page` with its tables replaced by those of the kept results."""
    compared, grown = load("compare"), load("growth")
    sections = {
        "Conditions": conditions(compared),
        "Targets": targets(compared),
        "Every item": items(compared),
        "Memory": memory(compared),
        "Growth": growth(grown),
        "PrefixCache": prefix_cache(load("prefix-cache")),
        "Serving": serving(json.loads((BENCH / "results" / "serving.json").read_text(encoding="utf-8"))),
        "Sampling": sampling(json.loads((BENCH / "results" / "sampling.json").read_text(encoding="utf-8"))),
        "Engines on a CPU": engine_cpu(json.loads((BENCH / "results" / "engine-cpu.json").read_text(encoding="utf-8"))),
        "Groups": groups(json.loads((BENCH / "results" / "hybrid.json").read_text(encoding="utf-8"))),
    }
    lines = [line for title, body in sections.items() for line in (f"### {title}", "", *body)]
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, "", *lines, END + after])


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
