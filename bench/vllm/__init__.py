"""What vLLM's scheduler costs with its own KV cache manager, with kvblocks, and with one that does nothing."""
