"""A small stand-in for mini-sglang, for machines without its sources: the calls that its parts make of each other."""
