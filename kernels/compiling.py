"""What Triton compiles, and how long that takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton

_MICROSECOND = 1e-6


@contextmanager
def compile_seconds() -> Iterator[dict[str, float]]:
    """The seconds that compiling takes inside this context, by the kernel's name.

    A kernel that Triton's cache on disk has counts 0 seconds. A listener that was set before is called too, and is set
    again afterwards.
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
