"""Attention: a step's ragged batch, the paged KV cache, and the backends."""
