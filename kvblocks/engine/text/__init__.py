"""Text and tokens: tokenizers, chat templates and stop strings."""
