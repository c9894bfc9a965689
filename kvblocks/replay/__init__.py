"""Replays traces of requests through the production manager, to show what a policy, a pool size or a tier is worth."""
