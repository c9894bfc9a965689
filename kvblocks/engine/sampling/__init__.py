"""From logits to tokens: what a request may ask for, its random numbers, and a step's draws for all rows together."""
