"""A plugin of pytest for vLLM's own tests: puts the schedulers under test in the places of vLLM's.

It is loaded before any test is imported, so a test that imports Scheduler or AsyncScheduler gets ours. Where SWAP is 0
in the environment vLLM's own stay. Each test's outcome is written to the file that OUTCOMES names.
"""

import json
import os
from pathlib import Path

import pytest
from vllm.v1.core.sched import async_scheduler, scheduler

from bench.vllm import schedulers

SWAP, OUTCOMES = "KVBLOCKS_SWAP", "KVBLOCKS_OUTCOMES"

_outcomes: dict[str, str] = {}


def _swap() -> None:
    ours = schedulers.adapter(schedulers.SCHEDULER), schedulers.adapter(schedulers.ASYNC_SCHEDULER)
    scheduler.Scheduler, async_scheduler.AsyncScheduler = ours


if os.environ.get(SWAP, "1") == "1":
    _swap()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test's outcome: passed, or the last line of what went wrong."""
    if report.passed:
        _outcomes.setdefault(report.nodeid, "passed")
    elif report.skipped:
        _outcomes[report.nodeid] = "skipped"
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        _outcomes[report.nodeid] = (crash.message if crash else str(report.longrepr)).splitlines()[0][:200]


def pytest_sessionfinish() -> None:
    """Write the outcomes."""
    Path(os.environ[OUTCOMES]).write_text(json.dumps(_outcomes), encoding="utf-8")
