"""Each test runs on a stand-in of mini-sglang and, where MINISGL_SRC names a checkout, on its own sources.

Without the checkout only `test_own_tests` is reported as skipped, with the reason; the others run on the stand-in.
"""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from integrations.mini_sglang import sources

KINDS = ["stand-in", "real"] if sources.SOURCES else ["stand-in"]
STAND_IN = Path(__file__).with_name("stand_in")
ADAPTER = "kvblocks.integrations.mini_sglang"


def forget(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "minisgl" or name == ADAPTER]:
        monkeypatch.delitem(sys.modules, name)


def without_pins(maker):
    def make(*given, pin_memory=False, **named):
        return maker(*given, **named)

    return make


@pytest.fixture(params=KINDS)
def minisgl(request, monkeypatch):
    """mini-sglang and our adapter, imported anew: kvcache, adapter, make_scheduler, is_real, set_page_size."""
    forget(monkeypatch)
    is_real = request.param == "real"
    if is_real:
        sources.load()  # on a machine without a GPU no memory can be pinned
        monkeypatch.setattr(torch, "empty", without_pins(torch.empty))
        monkeypatch.setattr(torch, "tensor", without_pins(torch.tensor))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    else:
        monkeypatch.syspath_prepend(STAND_IN)
    core = importlib.import_module("minisgl.core")

    def set_page_size(page_size):
        if is_real:
            vars(core)["_GLOBAL_CTX"] = core.Context(page_size=page_size)
        else:
            core.get_global_ctx().page_size = page_size

    set_page_size(1)
    kvcache = importlib.import_module("minisgl.kvcache")
    make = sources.RealScheduler if is_real else importlib.import_module("minisgl.scheduler").Scheduler

    def make_scheduler(engine, settings, cache_type):
        set_page_size(settings.page_size)
        return make(engine, settings, cache_type)

    yield SimpleNamespace(
        kvcache=kvcache,
        base=importlib.import_module("minisgl.kvcache.base"),
        adapter=importlib.import_module(ADAPTER),
        make_scheduler=make_scheduler,
        set_page_size=set_page_size,
        is_real=is_real,
    )
    forget(monkeypatch)
