"""From logits to tokens: a request's parameters, its random numbers, and a step's draws for all rows together."""
