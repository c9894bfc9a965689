"""Tiers that move bytes: a host arena and a disk below the engine's KV cache, and who carries blocks to and fro."""
