"""The engine's tiers: a host arena, a disk and a shared store below the KV cache, and the threads that move blocks."""
