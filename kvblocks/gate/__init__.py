"""The session gate: which sessions may take turns, so that the cache can remember their prompts."""
