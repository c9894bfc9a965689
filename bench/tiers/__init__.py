"""The benefit of tiers below the device: times to the first token, bandwidths, and the cost where nothing repeats."""
