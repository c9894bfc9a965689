"""Answers of a given form: JSON by a schema, one of several texts, or what a regular expression matches.

`bounds` says what of a schema is taken at all; `grammar` compiles it, with llguidance, for the vocabulary of one model.
What comes of that says before each token which ones may come; `engine.sampling` draws from these alone.
"""
