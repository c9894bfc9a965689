"""What a random walk adds to an error, so that one line of a log is enough to walk there again."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def where(seed: object, step: int, operation: object) -> Iterator[None]:
    """Add to whatever is raised: the seed, the number of the step, and the operation, a function or its name."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed}, step {step}: {getattr(operation, '__name__', operation)}")
        raise
