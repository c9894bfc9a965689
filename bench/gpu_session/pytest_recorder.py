"""A pytest plugin that writes each test's result to a session's file: `-p bench.gpu_session.pytest_recorder`.

Tests that an earlier session has finished are left out. With pytest-xdist, a worker whose CUDA context has become
unusable by an error ends itself after the test, and xdist starts another one.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from bench.attention.kernel_keys import fix_keys
from bench.gpu_session.cases import is_poisoned
from bench.gpu_session.results import Results
from bench.gpu_session.session import ITEM_VARIABLE, PATH_VARIABLE, POISONED

_FINISHED = "kvblocks_finished_tests"
_NO_TESTS = 5


def pytest_configure(config: Any) -> None:
    """Record, if a session asks for it, and let the tests find the kernels of its cache."""
    if PATH_VARIABLE not in os.environ:
        return
    fix_keys()
    worker = getattr(config, "workerinput", None)
    recorder = _Worker(worker[_FINISHED]) if worker is not None else _Recorder()
    config.pluginmanager.register(recorder, "kvblocks-session")


class _LeavesOut:
    """Leaves out finished tests. All workers must leave out the same, whenever they start."""

    def __init__(self, finished: set[str]) -> None:
        self.finished = finished

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        left = [item for item in items if item.nodeid in self.finished]
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item in items if item.nodeid not in self.finished]


class _Recorder(_LeavesOut):
    """In the process that has the results of all tests."""

    def __init__(self) -> None:
        self._results, self._item = Results(Path(os.environ[PATH_VARIABLE])), os.environ[ITEM_VARIABLE]
        super().__init__(self._results.finished(self._item))
        self._failed: dict[str, str] = {}
        self._skipped: dict[str, str] = {}
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_FINISHED] = sorted(self.finished)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._results.append(self._item, nodeid, state="began")

    def pytest_runtest_logreport(self, report: Any) -> None:
        nodeid = report.nodeid
        self._seconds[nodeid] = self._seconds.get(nodeid, 0.0) + report.duration
        if report.failed:
            self._failed.setdefault(nodeid, f"{report.when}: {report.longreprtext[-1500:]}")
        elif report.skipped:
            self._skipped[nodeid] = str(report.longrepr)[-300:]
        # A worker that dies reports a test in one piece ("???"), and ends no test.
        if report.when == "teardown" or report.when not in ("setup", "call"):
            self._end(nodeid)

    def _end(self, nodeid: str) -> None:
        facts: dict[str, Any] = {"case_seconds": round(self._seconds.pop(nodeid), 2)}
        why = self._failed.pop(nodeid, None)
        skipped = self._skipped.pop(nodeid, None)
        if why is not None:
            self._results.append(self._item, nodeid, state="failed", where=why, **facts)
        else:
            more = {} if skipped is None else {"skipped": skipped}
            self._results.append(self._item, nodeid, state="done", **facts, **more)

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        if exitstatus == _NO_TESTS and self.finished:
            session.exitstatus = 0


class _Worker(_LeavesOut):
    """In a process that runs tests for another one."""

    def __init__(self, finished: list[str]) -> None:
        super().__init__(set(finished))
        self._has_failed = False

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._has_failed |= report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        if self._has_failed and is_poisoned():
            os._exit(POISONED)
        self._has_failed = False
