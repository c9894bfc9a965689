"""The ecosystem's formats: names of blocks, events, snapshots and hints."""
