"""Pins that clients ask for: by the endpoints of the cache, and by `cache_control` in messages."""
