"""Structured output: answers that are JSON by a schema, one of several texts, or matched by a regular expression.

`bounds` says which schemas are accepted. `grammar` compiles them, with llguidance, for the vocabulary of one model. The
result says before each token which tokens may come, and `engine.sampling` draws from these alone.
"""
