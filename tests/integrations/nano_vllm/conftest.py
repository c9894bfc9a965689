"""Each test runs on a stand-in of nano-vllm and, where NANO_SRC names a checkout, on its own sources.

Without the checkout only `test_engine` is reported as skipped, with the reason; the others run on the stand-in.
"""

import importlib
import sys
from types import SimpleNamespace

import pytest

from integrations.nano_vllm import sources, stand_in

KINDS = ["stand-in", "real"] if sources.SOURCES else ["stand-in"]


def forget(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "nanovllm"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture(params=KINDS)
def nano(request, monkeypatch):
    """nano-vllm's modules, importable: scheduler, Sequence, BlockManager; is_real."""
    forget(monkeypatch)
    is_real = request.param == "real"
    if is_real:
        sources.load()
    else:
        for name, module in stand_in.make_modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    scheduler = importlib.import_module("nanovllm.engine.scheduler")
    sequence = importlib.import_module("nanovllm.engine.sequence").Sequence
    monkeypatch.setattr(sequence, "block_size", sequence.block_size)  # so that it is as before afterwards
    original = scheduler.BlockManager
    yield SimpleNamespace(scheduler=scheduler, Sequence=sequence, BlockManager=original, is_real=is_real)
    scheduler.BlockManager = original
    if is_real:
        forget(monkeypatch)
