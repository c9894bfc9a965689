"""A scheduler of ours that tells which manager it got, for engines whose core is in a process of its own."""

import os
from pathlib import Path
from typing import Any

from kvblocks.integrations.vllm import KVBlocksAsyncScheduler

TOLD = "KVBLOCKS_TOLD"  # in the environment: the file that gets a line for each scheduler


class TellingScheduler(KVBlocksAsyncScheduler):
    """Writes the class of its manager to a file."""

    def __init__(self, *args: Any, **what: Any) -> None:
        super().__init__(*args, **what)
        scheduler: Any = self
        with Path(os.environ[TOLD]).open("a", encoding="utf-8") as file:
            file.write(type(scheduler.kv_cache_manager).__name__ + "\n")
