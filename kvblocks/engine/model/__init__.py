"""What a model is: its configuration, weights and layers, and how both are got and read."""
