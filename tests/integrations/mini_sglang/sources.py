"""mini-sglang's own modules, from the checkout that MINISGL_SRC names; it isn't on PyPI.

The __init__ of some packages imports what only a machine with a GPU has, so it is not run. The radix tree compares keys
in C++, compiled with apache-tvm-ffi. Where that isn't installed, torch compares them.
"""

import importlib
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

SOURCES = os.environ.get("MINISGL_SRC")
REASON = "set MINISGL_SRC to a checkout of https://github.com/sgl-project/mini-sglang"
PACKAGES = ("minisgl", "minisgl.kernel", "minisgl.scheduler", "minisgl.utils")


def compare(one, other):
    """Return how many items two tensors have in common at their beginning."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).nonzero()
    return int(differ[0]) if len(differ) else length


def add_module(name, **names):
    module = ModuleType(name)
    vars(module).update(names)
    sys.modules[name] = module
    return module


def load():
    """Make the scheduler and the caches importable."""
    root = Path(SOURCES, "python")
    for name in PACKAGES:
        add_module(name, __path__=[str(root.joinpath(*name.split(".")))])
    sys.modules["minisgl.kernel"].fast_compare_key = compare
    utils = sys.modules["minisgl.utils"]
    for name in ("misc", "registry"):
        vars(utils).update(
            {
                key: value
                for key, value in vars(importlib.import_module(f"minisgl.utils.{name}")).items()
                if key[0] != "_"
            }
        )
    silent = SimpleNamespace(**dict.fromkeys(("debug_rank0", "info_rank0", "warning_rank0"), lambda *_: None))
    utils.init_logger, utils.load_tokenizer = (lambda *_, **__: silent), None
    add_module("minisgl.scheduler.config", SchedulerConfig=object)
    add_module("minisgl.scheduler.io", SchedulerIOMixin=object)
    importlib.import_module("minisgl.kvcache")
    sys.modules["minisgl"].kvcache = sys.modules["minisgl.kvcache"]


class RealScheduler:
    """mini-sglang's Scheduler, made without its engine, as the driver wants it."""

    def __init__(self, engine, settings, cache_type):
        from minisgl.core import SamplingParams
        from minisgl.message import AbortBackendMsg, UserMsg
        from minisgl.scheduler.cache import CacheManager
        from minisgl.scheduler.decode import DecodeManager
        from minisgl.scheduler.prefill import PrefillManager
        from minisgl.scheduler.scheduler import Scheduler
        from minisgl.scheduler.table import TableManager

        self.engine, self.eos = engine, engine.eos
        self.cancel = lambda uid: self.messages.append(AbortBackendMsg(uid))
        self.make = lambda uid, tokens, most: UserMsg(uid, tokens, SamplingParams(max_tokens=most))
        self.messages = []
        own = self.own = Scheduler.__new__(Scheduler)
        own.device = torch.device("cpu")
        own.table_manager = TableManager(settings.max_running, engine.page_table)
        own.cache_manager = CacheManager(settings.num_pages, settings.page_size, engine.page_table, cache_type)
        own.decode_manager = DecodeManager(settings.page_size)
        own.prefill_manager = PrefillManager(own.cache_manager, own.table_manager, own.decode_manager)
        own.finished_reqs, own.eos_token_id = set(), engine.eos
        own.token_pool, own.prefill_budget = own.table_manager.token_pool, settings.prefill_budget
        own.engine_stream_ctx = nullcontext()
        own.stream = None
        own.receive_msg, own.send_result = self.receive, self.send
        own.engine = SimpleNamespace(
            max_seq_len=engine.page_table.shape[1],
            page_table=engine.page_table,
            stream=SimpleNamespace(wait_stream=lambda _: None),
            graph_runner=SimpleNamespace(pad_batch=lambda batch: setattr(batch, "padded_reqs", batch.reqs)),
            attn_backend=SimpleNamespace(prepare_metadata=lambda _: None),
            sampler=SimpleNamespace(prepare=lambda _: None),
            forward_batch=self.forward,
        )

    def add(self, uid, tokens, max_tokens):
        self.messages.append(self.make(uid, tokens, max_tokens))

    def receive(self, blocking):
        messages, self.messages = self.messages, []
        return messages

    def send(self, replies):
        for reply in replies:
            self.engine.answers.setdefault(reply.uid, []).append(reply.next_token)

    def forward(self, batch, _):
        for req in batch.reqs:
            self.engine.found.setdefault(req.uid, req.cached_len)
        tokens = torch.tensor(self.engine.run(batch.reqs, self.own.token_pool), dtype=torch.int32)
        for req in batch.reqs:
            req.complete_one()
        # What is overlapped: the result is looked at after the next batch was launched.
        return ForwardOutput(tokens, tokens.clone(), SimpleNamespace(synchronize=lambda: None))

    def loop(self, last):
        return self.own.overlap_loop(last)

    def is_idle(self):
        return not (self.messages or self.own.prefill_manager.runnable or self.own.decode_manager.runnable)

    def check_integrity(self):
        self.own.cache_manager.check_integrity()

    @property
    def cache(self):
        return self.own.cache_manager.prefix_cache


class ForwardOutput(tuple):
    """(tokens on the device, tokens on the host, event), with the first by name."""

    __slots__ = ()

    def __new__(cls, *items):
        return super().__new__(cls, items)

    @property
    def next_tokens_gpu(self):
        return self[0]
