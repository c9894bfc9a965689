"""Proofs that kvblocks under a real vLLM decides and answers as vLLM does."""
