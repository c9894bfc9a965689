"""Adapters for block managers of several engines; each imports its engine, which has to be installed."""
