"""The reference engine: a small, complete example of how to run a real model on the block manager."""
