"""What tiers below the device are worth: times to the first token, bandwidths, and their cost where nothing repeats."""
