"""The benefit of prefix caching for a server's clients."""
