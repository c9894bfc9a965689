"""Why prompts missed the cache: what they are compared with, where they part, and what the cache knows."""
