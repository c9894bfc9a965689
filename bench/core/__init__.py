"""Block management: every call beside the peers', and against itself."""
