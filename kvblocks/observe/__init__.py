"""What people and engines look at: metrics, why a prefix missed, what is cached, and which sequences share blocks."""
