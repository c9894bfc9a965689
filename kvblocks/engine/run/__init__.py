"""How a step is computed, on the host or on a device: the forward pass, its runners, and what these need."""
