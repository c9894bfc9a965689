"""`kvblocks replay`, and what it prints and writes."""
