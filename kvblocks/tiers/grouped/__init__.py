"""Tiers of managers with several groups. Windows' blocks are looked up, stored and loaded beside whole prefixes."""
