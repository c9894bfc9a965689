"""Adapters for the block managers of several engines. Each imports its engine, which must be installed."""
