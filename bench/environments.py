"""Some benches need the environment of another engine. Without it they say how to make it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(name: str) -> Iterator[None]:
    """Around what imports an engine: exits with one line if it isn't installed. name: "mlx" or "vllm"."""
    try:
        yield
    except ModuleNotFoundError as error:
        python = f".venv-{name}/bin/python"
        sys.exit(f"bench.{name}: expected the environment that `make test-{name}` makes, {python}; got {error}")
