"""Tiers: where cached blocks are kept below the device, host memory or a disk, and what moves between them and when.

Nothing here moves a byte: `Tiers` says what to copy (`take_transfers`) and is told what came of it (`complete`).
"""
