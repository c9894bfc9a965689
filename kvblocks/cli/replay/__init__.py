"""`kvblocks replay`, and what it prints and writes."""

from kvblocks.cli.replay.commands import replay_commands

__all__ = ["replay_commands"]
