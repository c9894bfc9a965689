"""`DiskTier`: kvblocks' disk as a secondary tier of vLLM's offloading: bounded, checked, and whole after any crash.

    {"type": "DiskTier", "module_path": "kvblocks.integrations.vllm", "root_dir": "/var/kv", "max_bytes": 100000000000}

vLLM's scheduler asks and decides; this room keeps account of which slot holds which key (`slots`), moves bytes between
vLLM's host memory and a `kvblocks.tiers.disk.DiskStore` in threads of its own (`copies`), and says what a folder was
made for (`naming`). It uses neither torch nor a GPU. docs/integrations/vllm.md says what is verified.
"""

from kvblocks.integrations.vllm.disk.tier import DiskTier

__all__ = ["DiskTier"]
