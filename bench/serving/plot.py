"""The picture of a run of bench.serving: times to first token without and with caching, a panel a workload."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

_COLOURS = {"without": "#b5482a", "with": "#2a6fb5"}


def plot(results: dict[str, Any], path: Path) -> None:
    """Write a PNG. results: what bench.serving keeps as JSON."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = results["results"]
    figure, panels = plt.subplots(1, len(rows), figsize=(4.5 * len(rows), 3.6), squeeze=False)
    for panel, row in zip(panels[0], rows, strict=True):
        for name, colour in _COLOURS.items():
            values = sorted(row[name]["ttft_s"])
            shares = [(index + 1) / len(values) for index in range(len(values))]
            panel.step(values, shares, where="post", color=colour, label=f"{name} caching")
        panel.set_xscale("log")
        panel.set_xlabel("time to first token, s")
        panel.set_ylabel("share of requests")
        panel.set_title(f"{row['workload']}: median x{row['ratios']['ttft_p50_s']:.1f}", fontsize=10)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    conditions = results["conditions"]
    figure.suptitle(f"{conditions['model']}, {conditions['cpu']}, {conditions['rate']:g} a second", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
