"""vLLM's plug-in: a configuration that names our schedulers is checked before a model is loaded."""

import json
import sys
from importlib.metadata import entry_points

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from bench.vllm.schedulers import OPT, model_folder
from kvblocks import UnsupportedEngineError
from kvblocks.integrations.vllm import KVBlocksAsyncScheduler, KVBlocksScheduler
from kvblocks.integrations.vllm_plugin import choose, names_ours, register

OURS = "kvblocks.integrations.vllm.KVBlocksAsyncScheduler"
REFUSED = KVTransferConfig(kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both")


class Below(KVBlocksScheduler):
    pass


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """The plug-in as vLLM loads it, and taken back."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    (entry,) = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "kvblocks"]
    assert entry.load() is register
    register()


def make_config(**options):
    arguments = EngineArgs(
        model=options.pop("model", model_folder()), skip_tokenizer_init=True, enforce_eager=True, **options
    )
    return arguments.create_engine_config()


def test_what_is_refused_is_refused_before_a_model_is_loaded():
    """There is no model here at all: its folder has a configuration alone."""
    with pytest.raises(UnsupportedEngineError, match="SimpleCPUOffloadConnector"):
        make_config(scheduler_cls=OURS, kv_transfer_config=REFUSED)


def test_other_schedulers_are_not_checked():
    assert make_config(kv_transfer_config=REFUSED).kv_transfer_config == REFUSED
    assert make_config(scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler", kv_transfer_config=REFUSED)


def test_the_variable_chooses_ours_where_no_scheduler_is_named(monkeypatch):
    """With vLLM's own manager where something is unsupported, so that nothing that ran before fails."""
    monkeypatch.setenv("KVBLOCKS_AUTO", "mlx_lm,vllm")
    given = {"mine": 1}
    made = make_config(additional_config=given, kv_transfer_config=REFUSED, seed=0)
    kinds = {True: KVBlocksAsyncScheduler, False: KVBlocksScheduler}
    assert made.scheduler_config.get_scheduler_cls() is kinds[made.scheduler_config.async_scheduling]
    for is_async, kind in kinds.items():  # on a CPU vLLM always turns it off
        made.scheduler_config.async_scheduling = is_async
        choose(made)
        assert made.scheduler_config.get_scheduler_cls() is kind
    assert made.additional_config == {"mine": 1, "kvblocks_fallback": True} and given == {"mine": 1}
    named = "vllm.v1.core.sched.scheduler.Scheduler"
    assert make_config(scheduler_cls=named).scheduler_config.scheduler_cls == named
    monkeypatch.setenv("KVBLOCKS_AUTO", "mlx_lm")
    assert make_config().scheduler_config.scheduler_cls is None


def test_the_variable_leaves_a_configuration_alone_that_cannot_say_what_it_needs(monkeypatch):
    monkeypatch.setenv("KVBLOCKS_AUTO", "vllm")
    made = make_config()
    made.scheduler_config.scheduler_cls, made.additional_config = None, object()
    with pytest.warns(UserWarning, match="vllm was not installed: expected a dict as additional_config, got object"):
        choose(made)
    assert made.scheduler_config.scheduler_cls is None


def test_who_may_fall_back_is_not_refused():
    make_config(scheduler_cls=OURS, kv_transfer_config=REFUSED, additional_config={"kvblocks_fallback": True}, seed=0)


def test_what_is_served_is_not_refused():
    made = make_config(scheduler_cls=OURS)
    assert made.scheduler_config.scheduler_cls == OURS
    assert made.cache_config.prefix_cache_retention_interval == 0


def test_windows_beside_full_attention_are_seen_in_the_configuration(tmp_path):
    narrow = {"layer_types": ["sliding_attention", "full_attention"] * 6, "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps(OPT | narrow), encoding="utf-8")
    offloading = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
    what = {"model": str(tmp_path), "kv_transfer_config": offloading, "disable_hybrid_kv_cache_manager": False}
    with pytest.raises(UnsupportedEngineError, match=r"several KV cache groups.*--disable-hybrid-kv-cache-manager"):
        make_config(scheduler_cls=OURS, **what)
    make_config(scheduler_cls=OURS, **(what | {"disable_hybrid_kv_cache_manager": True}))


def test_nothing_is_imported_for_the_check(monkeypatch):
    monkeypatch.delitem(sys.modules, "vllm.engine.arg_utils")
    register()
    assert "vllm.engine.arg_utils" not in sys.modules


def test_registering_again_changes_nothing():
    wrapped = EngineArgs.create_engine_config
    register()
    assert EngineArgs.create_engine_config is wrapped


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (None, False),
        ("vllm.v1.core.sched.scheduler.Scheduler", False),
        ("kvblocks.integrations.vllmX.Scheduler", False),
        (OURS, True),
        (KVBlocksScheduler, True),
        (Below, True),
        (dict, False),
    ],
)
def test_our_schedulers_are_told_by_name_or_class(scheduler, expected):
    assert names_ours(scheduler) is expected
