"""As in transformers; the loop does this here."""
