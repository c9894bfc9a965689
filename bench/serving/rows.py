"""What bench.serving shows of a workload, on the terminal and in docs/performance.md."""

# What is shown: key, title, unit; and whether less is better, so that the ratio says how many times better it is.
ROWS = (
    ("ttft_p50_s", "TTFT p50", "s", True),
    ("ttft_p99_s", "TTFT p99", "s", True),
    ("first_ttft_s", "TTFT of the first, which waits for none", "s", True),
    ("later_ttft_p50_s", "TTFT p50 of all but the first", "s", True),
    ("itl_p50_s", "inter-token latency p50", "s", True),
    ("itl_p99_s", "inter-token latency p99", "s", True),
    ("latency_p50_s", "request latency p50", "s", True),
    ("latency_p99_s", "request latency p99", "s", True),
    ("seconds", "whole workload", "s", True),
    ("tokens_per_s", "generated tokens", "a s", False),
    ("num_computed_tokens", "tokens computed", "", True),
    ("hit_rate", "hit rate", "", None),
    ("saved", "prefill tokens saved", "", None),
)
