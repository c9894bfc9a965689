"""Replays traces on a model of a server that takes time, with or without a session gate: `kvblocks replay --gate`."""
