"""Tiers of managers with several groups. Blocks of windows are looked up, stored and loaded with their prefix."""
