"""`DiskTier`: kvblocks' disk as a secondary tier of vLLM's offloading: bounded, verified, and crash-safe.

    {"type": "DiskTier", "module_path": "kvblocks.integrations.vllm", "root_dir": "/var/kv", "max_bytes": 100000000000}

vLLM's scheduler decides what is stored and loaded. `slots` records which slot holds which key. `copies` has the threads
that move bytes between vLLM's host memory and a `kvblocks.tiers.disk.DiskStore`. `naming` describes what a folder was
made for. Nothing here uses torch or a GPU. docs/integrations/vllm.md says what is verified.
"""

from kvblocks.integrations.vllm.disk.tier import DiskTier

__all__ = ["DiskTier"]
