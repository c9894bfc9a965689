"""What prefix caching does for a server's clients."""
