"""The picture of a run of bench.fleet.traces: hit rates over the number of workers, a panel for each trace.

python -m bench.fleet.plot bench/results/fleet-traces.json docs/fleet.svg
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

_STYLES = {"round robin": ("#b5482a", "o"), "session": ("#7a7a2a", "s"), "precise": ("#2a6fb5", "^")}


def draw(results: dict[str, Any], path: Path) -> None:
    """Write an SVG, the same for the same results. results: what bench.fleet.traces keeps as JSON."""
    rows = results["results"]
    names = list(dict.fromkeys(row["trace"] for row in rows))
    with mpl.rc_context({"svg.hashsalt": "kvblocks", "svg.fonttype": "none"}):
        figure = Figure(figsize=(5.2 * len(names), 3.9), layout="constrained")
        for panel, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            for router, (colour, mark) in _STYLES.items():
                for has_store in (False, True):
                    line = sorted(
                        (row["num_workers"], row["hit_rate"])
                        for row in rows
                        if (row["trace"], row["router"], row["store_blocks"] is not None) == (name, router, has_store)
                    )
                    if not line:
                        continue  # a run that was cut short
                    label = f"{router}, shared store" if has_store else router
                    dashes = "--" if has_store else "-"
                    panel.plot(*zip(*line, strict=True), dashes, color=colour, marker=mark, label=label)
            panel.set_xscale("log", base=2)
            workers = sorted({row["num_workers"] for row in rows})
            panel.set_xticks(workers, [str(number) for number in workers])
            panel.xaxis.set_minor_locator(NullLocator())
            panel.set_xlabel("workers")
            panel.set_ylabel("blocks of prompts found")
            panel.yaxis.set_major_formatter(PercentFormatter(1.0))
            panel.set_ylim(0, 1)
            panel.grid(alpha=0.3)
            panel.set_title(name.removesuffix(".gz").removesuffix(".jsonl"), fontsize=9)
            panel.legend(fontsize=7)
        figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
