"""The production cache's decisions, made by NumPy for a whole prompt at once, which makes a replay fast."""
