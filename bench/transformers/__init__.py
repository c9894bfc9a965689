"""transformers' continuous batching with its own cache and with kvblocks: `python -m bench.transformers`."""
