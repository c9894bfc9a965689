"""`DiskTier`: kvblocks' disk as a secondary tier of vLLM's offloading: limited in size, checked, safe after a crash.

    {"type": "DiskTier", "module_path": "kvblocks.integrations.vllm", "root_dir": "/var/kv", "max_bytes": 100000000000}

vLLM's scheduler decides. This room records which slot holds which key (`slots`). Its threads move bytes between vLLM's
host memory and a `kvblocks.tiers.disk.DiskStore` (`copies`). It names what a folder was made for (`naming`). It uses
neither torch nor a GPU. docs/integrations/vllm.md says what is verified.
"""

from kvblocks.integrations.vllm.disk.tier import DiskTier

__all__ = ["DiskTier"]
