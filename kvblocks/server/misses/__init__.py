"""Why prompts missed the cache: what they are compared with, where they differ, and what the cache knows."""
