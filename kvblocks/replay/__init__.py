"""Traces of requests, run through the production manager: what a policy, a size or a tier would be worth."""
