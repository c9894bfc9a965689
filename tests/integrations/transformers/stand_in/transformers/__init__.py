"""A stand-in for transformers 5.15 to 5.17: an engine of a few lines whose parts have those versions' shape.

Nothing of it is transformers' code. A row of its one tensor holds (group, position, token), so what is read can be
compared with what ought to be there.
"""

__version__ = "5.17.0"
