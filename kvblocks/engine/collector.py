"""Keeps Python's garbage collector from scanning objects that all stay alive."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector inside this context. It would scan all new objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_collector() -> None:
    """Collect now, and exempt all objects that survive from later scans. Call it once modules and model are loaded.

    Without this, each full collection stops all threads for tenths of a second. Affects the whole process.
    """
    gc.collect()
    gc.freeze()
