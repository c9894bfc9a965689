"""What bench.serving shows of a workload, on the terminal and in bench/README.md."""

from typing import Any

# What is shown: key, title, unit, and whether less is better. The ratio says how many times better caching is; None: no
# ratio is shown.
ROWS = (
    ("ttft_p50_s", "TTFT p50", "s", True),
    ("ttft_p99_s", "TTFT p99", "s", True),
    ("first_ttft_s", "TTFT of the first, which waits for none", "s", True),
    ("later_ttft_p50_s", "TTFT p50 of all but the first", "s", True),
    ("num_decoding", "requests decoding at once", "", None),
    ("itl_p50_s", "inter-token latency p50", "s", True),
    ("itl_p99_s", "inter-token latency p99", "s", True),
    ("latency_p50_s", "request latency p50", "s", True),
    ("latency_p99_s", "request latency p99", "s", True),
    ("seconds", "whole workload", "s", True),
    ("tokens_per_s", "generated tokens", "a s", False),
    ("num_computed_tokens", "tokens computed", "", True),
    ("num_preemptions", "preemptions", "", None),
    ("hit_rate", "hit rate", "", None),
    ("saved", "prefill tokens saved", "", None),
)

# The same for what caching costs where nothing can be shared.
COST_ROWS = (
    ("num_steps", "forward passes"),
    ("num_computed_tokens", "tokens computed"),
    ("num_preemptions", "preemptions"),
    ("num_evicted_blocks", "blocks evicted"),
)


def shown_rows(row: dict[str, Any]) -> list[tuple[str, str, str, bool | None]]:
    """Return the rows of a workload's table: those that were measured, and preemptions only where there were any."""
    has_any = any(row[name]["num_preemptions"] for name in ("without", "with"))
    return [line for line in ROWS if line[0] in row["with"] and (line[0] != "num_preemptions" or has_any)]
