"""Tiers of managers with several groups: what a window needs is looked up, stored and loaded besides whole prefixes."""
