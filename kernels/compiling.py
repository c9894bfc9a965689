"""What Triton compiles, and how long that takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton

_MICROSECOND = 1e-6


@contextmanager
def compile_seconds() -> Iterator[dict[str, float]]:
    """Measure compiling inside this context: seconds by kernel name.

    A kernel from Triton's cache on disk counts 0 seconds. An earlier listener is still called, and is restored
    afterwards.
    """
    seconds: dict[str, float] = {}
    before = triton.knobs.compilation.listener

    def listen(*, src: Any, times: Any, cache_hit: bool, **rest: Any) -> None:
        name = src.fn.__name__ if hasattr(src, "fn") else src.name
        seconds[name] = seconds.get(name, 0.0) + (0.0 if cache_hit else times.total * _MICROSECOND)
        if before is not None:
            before(src=src, times=times, cache_hit=cache_hit, **rest)

    triton.knobs.compilation.listener = listen
    try:
        yield seconds
    finally:
        triton.knobs.compilation.listener = before
