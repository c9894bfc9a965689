"""The version of kvblocks, defined only here. The build reads it without importing the package."""

__version__ = "0.1.0"
