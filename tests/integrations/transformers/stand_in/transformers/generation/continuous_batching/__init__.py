"""As in transformers."""
