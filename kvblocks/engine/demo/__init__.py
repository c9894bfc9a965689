"""The demo: a support desk whose conversations share a long prompt."""
