"""Random walks over a manager, until a fault is found or a number of calls was made."""

import random
from collections.abc import Callable

from kvblocks.arguments import check_count, check_integer
from kvblocks.verify.adapter import CacheAdapter
from kvblocks.verify.calls import Call, Finish
from kvblocks.verify.errors import VerificationError
from kvblocks.verify.player import Player
from kvblocks.verify.report import Report
from kvblocks.verify.shrink import rename, shrink
from kvblocks.verify.walk import Walk

_CALLS_OF_A_WALK = 400
_POOLS = (4, 5, 7, 10, 16, 240)  # blocks; in the last one, nothing is evicted for long
_MIN_BLOCKS = 4

MakeAdapter = Callable[[int], CacheAdapter]


def run(make: MakeAdapter, steps: int = 100_000, seed: int = 1, *, num_blocks: int | None = None) -> Report:
    """Make `steps` random calls to managers that `make(num_blocks)` returns, and report what was met.

    make: an adapter class, or a function that returns an adapter of a new pool of `num_blocks` blocks. seed: equal
    seeds make equal calls. num_blocks: the size of all pools; None: several sizes. There is a new pool for every 400
    calls.

    Raises VerificationError at the first fault, with the fewest calls that were found to show a fault of the same kind,
    and InvalidArgumentError for wrong arguments.
    """
    steps = check_count("steps", steps, 1)
    seed = check_integer("seed", seed)
    if num_blocks is not None:
        num_blocks = check_count("num_blocks", num_blocks, _MIN_BLOCKS)
    report = Report(seed)
    while report.num_steps < steps:
        name = f"{seed}/{report.num_walks}"
        size = random.Random(name).choice(_POOLS) if num_blocks is None else num_blocks
        _walk(make, size, name, min(_CALLS_OF_A_WALK, steps - report.num_steps), report)
    return report


def _walk(make: MakeAdapter, num_blocks: int, seed: str, num_calls: int, report: Report) -> None:
    player = Player(make(num_blocks), report)
    walk = Walk(seed, player)
    calls: list[Call] = []
    report.num_walks += 1
    try:
        for _ in range(num_calls):
            calls.append(walk.next())
            report.num_steps += 1
            player.play(calls[-1])
        calls.append(Finish())
        player.play(calls[-1])
    except Exception as error:
        raise _shortest(make, num_blocks, calls, _as_fault(error)) from error


def _shortest(make: MakeAdapter, num_blocks: int, calls: list[Call], first: VerificationError) -> VerificationError:
    """Return a fault of the same kind that fewer calls show, perhaps in a smaller pool; `first` if there is none."""
    sizes = [*(size for size in _POOLS if size < num_blocks), num_blocks]
    size = next((size for size in sizes if _shows(make, size, calls, first.kind)), num_blocks)
    shortest = rename(shrink(calls, lambda fewer: _shows(make, size, fewer, first.kind)))
    found = _fault(make, size, shortest) or first
    return VerificationError(found.kind, found.what, (f"a pool of {size} blocks", *map(str, shortest)))


def _as_fault(error: Exception) -> VerificationError:
    if isinstance(error, VerificationError):
        return error
    return VerificationError("raised", f"{type(error).__name__}: {error}")


def _fault(make: MakeAdapter, num_blocks: int, calls: list[Call]) -> VerificationError | None:
    """Return what a new pool does wrong when these calls are made, or None."""
    try:
        player = Player(make(num_blocks), Report(0))
        for call in calls:
            player.play(call)
    except Exception as error:  # noqa: BLE001  # a manager may raise anything
        return _as_fault(error)
    return None


def _shows(make: MakeAdapter, num_blocks: int, calls: list[Call], kind: str) -> bool:
    found = _fault(make, num_blocks, calls)
    return found is not None and found.kind == kind
