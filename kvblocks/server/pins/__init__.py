"""Pins that clients ask for, by the endpoints of the cache or by `cache_control` in messages."""
