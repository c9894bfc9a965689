"""Traces of requests, replayed through the production manager, to see what a policy, a size or a tier is worth."""
