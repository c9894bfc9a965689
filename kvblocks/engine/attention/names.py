"""The values that the options `attention` and `kv_cache_dtype` accept.

This module imports nothing, because shell completion imports it and should stay fast.
"""

ATTENTIONS = ("auto", "triton", "torch", "flash-attn", "flashinfer")

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
"""The names are those of vLLM's `--kv-cache-dtype`; "fp8" means e4m3."""
