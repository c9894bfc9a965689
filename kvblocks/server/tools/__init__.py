"""Tools: what a client defines and chooses, how a model writes calls, and calls read out of an answer's text."""
