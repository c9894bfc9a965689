"""vLLM's Scheduler without a model: with vLLM's own KV cache manager, or with kvblocks.

ADAPTER names the module whose schedulers are under test. The tests of the integration and the bench both take it from
here. The environment variable KVBLOCKS_VLLM_ADAPTER names another module, such as one with a fault put in.
"""

import json
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PYTHONHASHSEED", "0")  # else vLLM warns that its xxhash digests differ between processes

import torch
import vllm
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

ADAPTER = os.environ.get("KVBLOCKS_VLLM_ADAPTER", "kvblocks.integrations.vllm")
SCHEDULER = "KVBlocksScheduler"
ASYNC_SCHEDULER = "KVBlocksAsyncScheduler"
MANAGER = "KVBlocksCacheManager"
HASH = "sha256"  # vLLM's default
VLLM_VERSION = tuple(int(part) for part in vllm.__version__.split(".")[:2])
# Since 0.33 a block's hash has the token behind it too if a model like EAGLE's makes drafts.
LOOKS_AHEAD = hasattr(SpeculativeConfig, "disable_lookahead_block_hashes")
RING = 8  # slots of a ring buffer
LAYOUT = "BLHNC"  # of tensors, which the attention backend would choose; it makes no difference here

VOCABULARY = 50_272
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "do_layer_norm_before": True,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "torch_dtype": "float16",
    "vocab_size": VOCABULARY,
    "word_embed_proj_dim": 768,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a scheduler, with names and defaults close to vLLM's.

    num_blocks includes vLLM's null block. num_drafts: speculative tokens per step. is_eagle: these come from a draft
    model like EAGLE's, which also writes keys and values. They depend on the next token, so a block's hash includes
    that token, or, before vLLM 0.33 and with drops_block, a hit's last block is dropped. runner: the version of vLLM's
    model runner, 1 or 2. windows, chunks: the lengths of sliding windows and of chunks; each adds a group of layers to
    the one with full attention. keeps_windows: vLLM caches all blocks of windows; otherwise only few, as by default
    (`prefix_cache_retention_interval`), and all states. has_ring: adds a group of layers with a ring buffer. is_latent:
    full attention is MLA; a sparse indexer's cache is in its block table, too. num_states: how many groups of recurrent
    layers are added. saves_within: their kernels can save a state within a chunk, as Mamba2's. has_events: events
    report what is cached, and nobody receives them.
    """

    num_blocks: int = 4000
    block_size: int = 16
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    long_prefill_token_threshold: int = 0
    is_async: bool = False
    num_drafts: int = 0
    is_eagle: bool = False
    drops_block: bool = False
    has_caching: bool = True
    policy: str = "fcfs"
    watermark: float = 0.0
    reserves_full_prompt: bool = True
    runner: int = 1
    windows: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    keeps_windows: bool = False
    has_ring: bool = False
    is_latent: bool = False
    num_states: int = 0
    saves_within: bool = False
    has_events: bool = False

    @property
    def num_ahead(self) -> int:
        """How many tokens after a block its hash includes."""
        return int(LOOKS_AHEAD and self.is_eagle and not self.drops_block and self.has_caching)


def adapter(name: str) -> Any:
    """Return the object called `name` in the module under test."""
    return getattr(import_module(ADAPTER), name)


@cache
def model_folder() -> str:
    """Return a folder that holds a model's configuration, and no model."""
    folder = Path(tempfile.mkdtemp(prefix="kvblocks-vllm-")) / "facebook" / "opt-125m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(OPT), encoding="utf-8")
    return str(folder)


@cache
def request_hasher(block_size: int, num_ahead: int = 0) -> Any:
    """Return vLLM's function that hashes the blocks of a request, including `num_ahead` tokens after each."""
    hash_function = get_hash_fn_by_name(HASH)
    init_none_hash(hash_function)
    ahead = (num_ahead,) if num_ahead else ()
    return get_request_block_hasher(block_size, hash_function, *ahead)


def make_vllm_config(settings: Settings) -> VllmConfig:
    """Return vLLM's configuration for these settings."""
    model = ModelConfig(
        model=model_folder(),
        dtype="float16",
        seed=42,
        skip_tokenizer_init=True,
        max_model_len=settings.max_model_len,
    )
    scheduler = SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        enable_chunked_prefill=True,
        async_scheduling=settings.is_async,
        is_encoder_decoder=False,
        watermark=settings.watermark,
        policy=settings.policy,
        scheduler_reserve_full_isl=settings.reserves_full_prompt,
    )
    cache_config = CacheConfig(block_size=settings.block_size, enable_prefix_caching=settings.has_caching)
    cache_config.num_gpu_blocks = cache_config.num_gpu_blocks_override = settings.num_blocks
    if settings.keeps_windows:
        cache_config.prefix_cache_retention_interval = None
    if settings.num_states and settings.has_caching:
        cache_config.mamba_cache_mode = "align"  # as vLLM sets it for such models
    speculative = None
    if settings.num_drafts:
        speculative = SpeculativeConfig(
            model="ngram",
            method="ngram_gpu" if settings.is_async else "ngram",
            num_speculative_tokens=settings.num_drafts,
            prompt_lookup_max=settings.num_drafts,
            prompt_lookup_min=1,
        )
    config = VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache_config,
        parallel_config=ParallelConfig(),
        speculative_config=speculative,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if settings.has_events else None,
    )
    if settings.is_eagle:
        config.speculative_config.method = "eagle"  # set afterwards, so that vLLM doesn't look for EAGLE's model
        if LOOKS_AHEAD:
            config.speculative_config.disable_lookahead_block_hashes = settings.drops_block
    return config


def make_kv_cache_config(settings: Settings, config: VllmConfig) -> KVCacheConfig:
    """Return what vLLM's engine makes of these groups of layers, with all options of `config`.

    They are one of full attention, and one for every window, for every kind of chunks, for ring buffers, and for
    recurrent states.
    """
    shape: dict[str, Any] = {"block_size": settings.block_size, "num_kv_heads": 1, "head_size": 1}
    specs: list[Any] = [FullAttentionSpec(**shape, dtype=torch.float32)]
    if settings.is_latent:
        specs = [MLAAttentionSpec(**shape, dtype=torch.float32)]
    specs += [SlidingWindowSpec(**shape, dtype=torch.float32, sliding_window=window) for window in settings.windows]
    specs += [
        ChunkedLocalAttentionSpec(**shape, dtype=torch.float32, attention_chunk_size=size) for size in settings.chunks
    ]
    if settings.has_ring:
        specs.append(CircularBufferSpec(**(shape | {"block_size": RING}), dtype=torch.float32))
    state: dict[str, Any] = {"shapes": ((1, 1),), "dtypes": (torch.float32,), "block_size": settings.max_model_len}
    if settings.has_caching:
        state |= {"block_size": settings.block_size, "mamba_cache_mode": "align"}
    if settings.saves_within:
        state |= {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
    specs += [MambaSpec(**state) for _ in range(settings.num_states)]
    return as_engine(config, specs)


def as_engine(config: VllmConfig, specs: list[Any]) -> KVCacheConfig:
    """Return the configuration that vLLM's engine makes of a group for each spec, with all options of `config`."""
    config.cache_config.kv_cache_layout = config.cache_config.kv_cache_layout or LAYOUT
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    return get_kv_cache_config_from_groups(config, groups, available_memory=0)


def make_scheduler(
    settings: Settings,
    kind: type[Scheduler] | None = None,
    *,
    log_stats: bool = True,
    config: VllmConfig | None = None,
    groups: KVCacheConfig | None = None,
    block_size: int | None = None,
) -> Scheduler:
    """Return a scheduler with these settings: of class `kind`, or vLLM's own.

    config, groups, block_size: used instead of what the settings would give.
    """
    config = config or make_vllm_config(settings)
    register_all_kvcache_specs(config)
    kind = kind or own_scheduler(settings)
    made = groups or make_kv_cache_config(settings, config)
    found, hash_block_size = resolve_kv_cache_block_sizes(made, config)
    scheduler = kind(
        vllm_config=config,
        kv_cache_config=made,
        block_size=block_size or found,
        hash_block_size=block_size or hash_block_size,
        log_stats=log_stats,
        structured_output_manager=StructuredOutputManager(config),
    )
    scheduler.use_v2_model_runner = settings.runner == 2
    return scheduler


def own_scheduler(settings: Settings) -> type[Scheduler]:
    """Return vLLM's scheduler for these settings, with vLLM's manager."""
    return AsyncScheduler if settings.is_async else Scheduler


def our_scheduler(settings: Settings) -> type[Scheduler]:
    """Return the scheduler under test for these settings."""
    found: type[Scheduler] = adapter(ASYNC_SCHEDULER if settings.is_async else SCHEDULER)
    return found
