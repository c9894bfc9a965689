"""The cost of vLLM's scheduler with its own KV cache manager, with kvblocks, and with one that does nothing."""
