"""The cases of an item, in its own process: each result is written before the next case begins."""

import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from bench.gpu_session.results import Results
from bench.gpu_session.session import POISONED

Facts = dict[str, Any]
Case = tuple[str, Callable[[], Facts]]
"""A name, and the function to run. Facts with `is_right: False` are a wrong result."""


def run_cases(item: str, cases: Iterable[Case], results: Results, part: int = 0) -> int:
    """Run the unfinished cases. Return the exit status: 1 if one was wrong or failed."""
    finished = results.finished(item)
    status = 0
    for name, run in cases:
        if name in finished:
            continue
        results.append(item, name, state="began", part=part)
        start = time.perf_counter()
        try:
            facts = run()
        except Exception as error:  # noqa: BLE001  # a case may raise anything; the others still run
            where = traceback.format_exc()[-1500:]
            results.append(item, name, state="failed", part=part, error=_first_line(error), where=where)
            status = 1
            if is_poisoned():
                return POISONED
            continue
        state = "done" if facts.get("is_right", True) else "wrong"
        status = status if state == "done" else 1
        seconds = round(time.perf_counter() - start, 3)
        results.append(item, name, state=state, part=part, case_seconds=seconds, **facts)
    return status


def is_poisoned() -> bool:
    """Whether an error has left this process's CUDA context unusable. Waits for the device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:500]
