"""The picture of a run of bench.serving: times to first token without and with caching, a panel for each workload."""

import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_STEPS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
_MAX_TICKS = 6
_MAX_COLUMNS = 3
_COLOURS = {"without": "#b5482a", "with": "#2a6fb5"}


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers from `low` to `high`, at most _MAX_TICKS, about as far apart on a logarithmic axis."""
    first = math.floor(math.log10(low))
    found = [step * 10.0**power for power in range(first, math.ceil(math.log10(high)) + 1) for step in _STEPS]
    found = [tick for tick in found if low <= tick <= high]
    if len(found) < 3:  # a narrow range, where a logarithmic axis is nearly a plain one
        found = [float(tick) for tick in MaxNLocator(_MAX_TICKS - 1).tick_values(low, high) if low <= tick <= high]
    while len(found) > _MAX_TICKS:
        gaps = [found[place + 1] / found[place] for place in range(len(found) - 1)]
        narrow = gaps.index(min(gaps))
        # Of two that are close the rounder one stays.
        del found[narrow + (len(f"{found[narrow + 1]:g}".strip("0.")) > len(f"{found[narrow]:g}".strip("0.")))]
    return found


def plot(results: dict[str, Any], path: Path) -> None:
    """Write a PNG. results: what bench.serving keeps as JSON."""
    draw(results).savefig(path, dpi=130)


def draw(results: dict[str, Any]) -> Figure:
    """Return the picture."""
    rows = results["results"]
    num_columns = min(len(rows), _MAX_COLUMNS)
    num_lines = -(-len(rows) // num_columns)
    figure = Figure(figsize=(4.5 * num_columns, 3.6 * num_lines))
    panels = list(figure.subplots(num_lines, num_columns, squeeze=False).flat)
    for panel in panels[len(rows) :]:
        panel.remove()
    for panel, row in zip(panels, rows, strict=False):
        for name, colour in _COLOURS.items():
            values = sorted(row[name]["ttft_s"])
            shares = [(i + 1) / len(values) for i in range(len(values))]
            panel.step(values, shares, where="post", color=colour, label=f"{name} caching")
        panel.set_xscale("log")
        panel.set_xticks(chosen := ticks(*panel.get_xlim()), [f"{tick:g}" for tick in chosen])
        panel.set_xticks([], minor=True)
        panel.set_xlabel("time to first token, s")
        panel.set_ylabel("share of requests")
        panel.set_ylim(0, 1.05)
        panel.set_title(f"{row['workload']}: median x{row['ratios']['ttft_p50_s']:.1f}", fontsize=10)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    conditions = results["conditions"]
    figure.suptitle(f"{conditions['model']}, {conditions['cpu']}, {conditions['rate']:.2g} a second", fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    return figure
