"""What isn't served is refused before anything runs, by name; and so is a vLLM that lacks what is used."""

import warnings
from typing import Any

import pytest
import torch
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import async_scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    MambaSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from bench.vllm.schedulers import Settings, make_scheduler, make_vllm_config, our_scheduler
from kvblocks import UnsupportedEngineError
from kvblocks.integrations.vllm import KVBlocksCacheManager, probe
from kvblocks.integrations.vllm.early import check_scheduler
from kvblocks.integrations.vllm.probe import check_calls, check_vllm

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=64)
STATE: dict[str, Any] = {"shapes": ((1, 1),), "dtypes": (torch.float32,)}
MAMBA = MambaSpec(**STATE, block_size=16, mamba_cache_mode="align")
UNCACHED_MAMBA = MambaSpec(**STATE, block_size=2048)


def make_config(*specs: Any, **what: Any) -> KVCacheConfig:
    groups = [
        spec if isinstance(spec, KVCacheGroupSpec) else KVCacheGroupSpec([f"layer {number}"], spec)
        for number, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=groups, **what)


def make_manager(config: KVCacheConfig, **what: Any) -> KVBlocksCacheManager:
    register_all_kvcache_specs(make_vllm_config(Settings()))
    return KVBlocksCacheManager(config, 2048, 16, 16, **what)


REFUSED = {
    "recurrent states without a mode": (make_config(FULL, UNCACHED_MAMBA), {}, "in mode 'none' with caching"),
    "recurrent states that aren't cached": (
        make_config(FULL, MAMBA),
        {"enable_caching": False},
        "in mode 'align' without caching",
    ),
    "recurrent states within blocks": (
        make_config(FULL, MambaSpec(**STATE, block_size=32, mamba_cache_mode="align")),
        {},
        "recurrent states that are found at multiples of 16 tokens.*without --prefix-match-unit",
    ),
    "recurrent states over context ranks": (
        make_config(FULL, MAMBA),
        {"dcp_world_size": 2},
        "context parallelism with recurrent states",
    ),
    "recurrent states with drafts": (
        make_config(FULL, MambaSpec(**STATE, block_size=2048, num_speculative_blocks=2)),
        {"enable_caching": False},
        "recurrent states .Mamba. with speculative decoding",
    ),
    "no groups": (make_config(), {}, "a model without KV cache groups"),
    "blocks of odd sizes": (
        make_config(FULL, FullAttentionSpec(**(SHAPE | {"block_size": 24}))),
        {},
        "blocks of 16 and of 24 tokens: one has to divide the other",
    ),
    "cross attention": (make_config(FULL, CrossAttentionSpec(**SHAPE)), {}, "CrossAttentionSpec in KV cache group 1"),
    "chunks over context ranks": (
        make_config(FULL, ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)),
        {"dcp_world_size": 2},
        "context parallelism with chunked local",
    ),
    "encoders": (make_config(EncoderOnlyAttentionSpec(**SHAPE)), {}, "EncoderOnlyAttentionSpec in KV cache group 0"),
    "attention sinks": (make_config(SinkFullAttentionSpec(**SHAPE, sink_len=16)), {}, "SinkFullAttentionSpec"),
    "reference windows": (make_config(RSWASpec(**SHAPE, rswa_window=64)), {}, "RSWASpec in KV cache group 0"),
    "sparse caches on the host": (
        make_config(KVCacheGroupSpec(["layer"], FULL, role=KVCacheGroupRole.HISPARSE_SOURCE)),
        {},
        "the role hisparse_source of KV cache group 0",
    ),
    "windows over context ranks": (
        make_config(FULL, WINDOW),
        {"dcp_world_size": 2},
        "context parallelism with sliding",
    ),
    "windows that keep more": (
        make_config(FULL, SlidingWindowSpec(**SHAPE, sliding_window=64, extra_retained_tokens=2)),
        {},
        "windows that retain more",
    ),
    "EAGLE with windows": (
        make_config(FULL, WINDOW),
        {"use_eagle": True},
        "EAGLE with several KV cache groups.*--disable-hybrid-kv-cache-manager",
    ),
    "events of hashes that look ahead": (
        make_config(FULL),
        {"num_hash_lookahead_tokens": 1, "enable_kv_cache_events": True},
        "KV events with lookahead hashes",
    ),
    "multi-module MTP": (make_config(FULL), {"num_prefill_lookahead": 2}, "multi-module MTP"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name):
    config, options, feature = REFUSED[name]
    with pytest.raises(UnsupportedEngineError, match=feature):
        make_manager(config, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_every_refusal_says_how_to_get_vllms_own_manager(name):
    config, options, _ = REFUSED[name]
    with pytest.raises(UnsupportedEngineError, match=r"leave out --scheduler-cls, or add --additional-config .*true"):
        make_manager(config, **options)


def test_what_is_served_is_not_refused():
    for config in (make_config(FULL), make_config(FULL, WINDOW), make_config(WINDOW), make_config(FULL, MAMBA)):
        make_manager(config)
    make_manager(make_config(FULL), dcp_world_size=2, use_eagle=True, num_prefill_lookahead=1)
    for specs in ([UNCACHED_MAMBA], [FULL, UNCACHED_MAMBA], [FULL, MambaSpec(**STATE, block_size=2000)]):
        make_manager(make_config(*specs), enable_caching=False)


@pytest.mark.parametrize("windows", [[FULL, WINDOW], [WINDOW]], ids=["beside full attention", "alone"])
@pytest.mark.parametrize("interval", [None, 0, 64])
def test_an_interval_of_retention_without_effect_is_warned_of(windows, interval):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_manager(make_config(*windows, prefix_cache_retention_interval=interval))
    said = [str(warning.message) for warning in caught if "prefix_cache_retention_interval" in str(warning.message)]
    assert len(said) == (1 if interval else 0)


def test_vllm_itself_does_not_start_with_attention_sinks_in_blocks():
    """If this fails, vLLM has mended it: then serve them: the first blocks are the sinks'."""
    sinks = make_config(SinkFullAttentionSpec(**SHAPE, sink_len=16))
    with pytest.raises(TypeError, match="SinkFullAttentionManager"):
        make_scheduler(Settings(), groups=sinks)


def with_options(options: dict[str, Any]) -> VllmConfig:
    """Return a configuration with --additional-config."""
    config = make_vllm_config(Settings(has_caching=False))
    config.additional_config = options
    return config


def test_vllms_own_manager_is_used_instead_if_that_is_asked_for():
    settings = Settings(has_caching=False)
    groups = make_config(FULL, MambaSpec(**STATE, block_size=16, num_speculative_blocks=2))
    for options in ({}, {"kvblocks_fallback": False}, {"other": True}):
        with pytest.raises(UnsupportedEngineError, match="speculative"):
            make_scheduler(settings, our_scheduler(settings), config=with_options(options), groups=groups)
    config = with_options({"kvblocks_fallback": True})
    with pytest.warns(UserWarning, match=r"vLLM's own KV cache manager is used instead of kvblocks: .*speculative"):
        made = make_scheduler(settings, our_scheduler(settings), config=config, groups=groups)
    assert type(made.kv_cache_manager) is KVCacheManager


def make_with_connector(name: str, extra: dict[str, Any] | None = None, num_groups: int = 1, specs: Any = ()) -> Any:
    """Return the part of a scheduler that the checks read."""
    transfer = KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra or {})
    config = make_vllm_config(Settings())
    config.kv_transfer_config = transfer

    class Made:
        num_prefill_lookahead = 0
        kv_cache_config = make_config(*(specs or [FULL, WINDOW][:num_groups]))
        vllm_config = config

    return Made()


@pytest.mark.parametrize(
    ("made", "feature"),
    [
        (lambda: make_with_connector("SimpleCPUOffloadConnector"), "SimpleCPUOffloadConnector"),
        (lambda: make_with_connector("MooncakeStoreConnector"), "MooncakeStoreConnector"),
        (lambda: make_with_connector("HiSparseConnector"), "HiSparseConnector"),
        (lambda: make_with_connector("OffloadingConnector", num_groups=2), "OffloadingConnector with several"),
        (lambda: make_with_connector("NixlConnector", specs=[FULL, MAMBA]), "KV connectors with recurrent states"),
        (
            lambda: make_with_connector(
                "MultiConnector",
                {"connectors": [{"kv_connector": "NixlConnector"}, {"kv_connector": "MooncakeStoreConnector"}]},
            ),
            "MooncakeStoreConnector",
        ),
    ],
)
def test_connectors_that_reach_into_vllms_pool_are_refused_by_name(made, feature):
    with pytest.raises(UnsupportedEngineError, match=feature):
        check_scheduler(made())


def test_connectors_that_ask_the_manager_are_served():
    check_scheduler(make_with_connector("NixlConnector"))
    check_scheduler(make_with_connector("OffloadingConnector"))
    check_scheduler(make_with_connector("MultiConnector", {"connectors": [{"kv_connector": "NixlConnector"}]}))


def test_a_refusal_comes_from_the_scheduler_before_it_has_our_manager():
    config = make_vllm_config(Settings())
    config.cache_config.mamba_block_size = 16
    kind = our_scheduler(Settings())
    drafted = MambaSpec(**STATE, block_size=16, mamba_cache_mode="align", num_speculative_blocks=2)
    with pytest.raises(UnsupportedEngineError, match="recurrent states"):
        make_scheduler(Settings(), kind, config=config, groups=make_config(FULL, drafted))


@pytest.mark.parametrize(
    ("doctor", "named"),
    [
        (lambda patch: patch.delattr(kv_events, "BlockStored"), "kv_events.BlockStored"),
        (lambda patch: patch.delattr(async_scheduler, "AsyncScheduler"), "async_scheduler.AsyncScheduler"),
        (lambda patch: patch.delattr("vllm.v1.metrics.stats.PrefixCacheStats"), "PrefixCacheStats"),
        (
            lambda patch: patch.delattr("vllm.v1.kv_cache_spec_registry.KVCacheSpecRegistry.get_manager_class"),
            "KVCacheSpecRegistry.get_manager_class",
        ),
        (
            lambda patch: patch.setattr(probe.inspect, "getsource", lambda _: SOURCE.replace("cache_salt", "salt")),
            "Request.cache_salt",
        ),
        (
            lambda patch: patch.setattr(
                probe.inspect, "getsource", lambda _: SOURCE.replace("mm_features", "mm_features2")
            ),
            "Request.mm_features",
        ),
        (
            lambda patch: patch.delattr("vllm.v1.core.sched.scheduler.Scheduler._handle_invalid_blocks"),
            "Scheduler._handle_invalid_blocks",
        ),
    ],
)
def test_a_vllm_that_lacks_a_part_is_refused_by_the_parts_name(monkeypatch, doctor, named):
    doctor(monkeypatch)
    with pytest.raises(UnsupportedEngineError, match=named):
        check_vllm()


SOURCE = probe.inspect.getsource(vllm.v1.request.Request)


def test_a_vllm_that_calls_for_more_is_refused_by_the_calls_name(monkeypatch):
    check_calls(KVBlocksCacheManager)
    monkeypatch.setattr(KVCacheManager, "spill_blocks", lambda self: None, raising=False)
    with pytest.raises(UnsupportedEngineError, match=r"KVCacheManager\.spill_blocks"):
        make_manager(make_config(FULL))


def test_a_vllm_that_passes_more_is_refused_by_the_parameters_name(monkeypatch):
    monkeypatch.setattr(KVCacheManager, "free", lambda self, request, how: None)
    with pytest.raises(UnsupportedEngineError, match=r"KVCacheManager\.free\(how\)"):
        make_manager(make_config(FULL))
    monkeypatch.undo()
    original = KVCacheManager.__init__
    monkeypatch.setattr(KVCacheManager, "__init__", lambda self, kv_cache_config, tier=None: original(self))
    with pytest.raises(UnsupportedEngineError, match=r"KVCacheManager\.__init__\(tier\)"):
        make_manager(make_config(FULL))


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1", "0.33.1", "0.34.0"])
def test_a_version_that_was_not_tested_is_warned_of_once(monkeypatch, version):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for tested in ("0.32.0+cpu", "0.32.0", "0.33.0"):
            monkeypatch.setattr(vllm, "__version__", tested)
            check_vllm()
        assert not caught
        monkeypatch.setattr(vllm, "__version__", version)
        check_vllm()
    (warning,) = caught
    assert f"tested with 0.32.0, 0.33.0, not with {version}; all parts" in str(warning.message)


def test_a_python_without_vllm_is_told_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(UnsupportedEngineError, match="got none, which lacks"):
        check_vllm()
