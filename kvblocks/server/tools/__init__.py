"""Tools: what a client defines and chooses, how models write calls, and how calls are read from an answer's text."""
