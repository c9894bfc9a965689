"""Models: configuration, weights and layers, and how they are fetched, converted and loaded."""
