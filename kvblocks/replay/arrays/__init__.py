"""The production cache's decisions for a whole prompt at once, by NumPy: what makes a replay fast."""
