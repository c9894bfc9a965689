"""The command line: `app` puts the commands together; each family of commands is a module."""

from kvblocks.cli.app import main

__all__ = ["main"]
