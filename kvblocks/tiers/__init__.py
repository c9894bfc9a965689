"""Tiers: places below the device that keep cached blocks, such as host memory or a disk, and what moves between them.

Nothing here moves a byte. `Tiers` says what to copy (`take_transfers`), and the engine reports the result (`complete`).
"""
