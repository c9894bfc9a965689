"""The names that options of attention and of the KV cache's dtype take.

This module imports nothing, since a shell that completes an option waits for it.
"""

ATTENTIONS = ("auto", "triton", "torch", "flash-attn", "flashinfer")

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
"""Named as in vLLM's `--kv-cache-dtype`: "fp8" is e4m3."""
