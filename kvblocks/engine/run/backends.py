"""Chooses an engine's attention (`Engine(attention=...)`), and the runner that goes with it.

Kernels are imported only when they are chosen, so the engine works without triton, flash-attn and FlashInfer.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor

from kvblocks import KVCacheManager, KVLayer, LatentLayer, Plan, RecurrentState, StateLayer, plan
from kvblocks.arguments import check_one_of, pip_install
from kvblocks.engine.attention.attention import AttentionBackend, TiledTorchAttention, TorchAttention
from kvblocks.engine.attention.flash_attention import FlashAttention, check_flash_attention, load_flash_attention
from kvblocks.engine.attention.kv_scales import E4M3, KVScales, is_8_bit
from kvblocks.engine.attention.names import ATTENTIONS
from kvblocks.engine.attention.state_memory import state_bytes
from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.layer_attention import LayerLocation
from kvblocks.engine.run.calibration import calibrate
from kvblocks.engine.run.determinism import choose_determinism
from kvblocks.engine.run.forward import DecoderModel
from kvblocks.engine.run.rows import NATURAL
from kvblocks.engine.run.runner import LoadedModel, ModelRunner
from kvblocks.engine.sampling.batch_sampler import DrawTokens
from kvblocks.errors import InvalidArgumentError

logger = logging.getLogger("kvblocks.engine.run")

_NO_LIMIT = 2**62


def plan_cache(
    config: ModelConfig, block_size: int, dtype: torch.dtype, state_dtype: torch.dtype | None = None
) -> Plan:
    """Plan a model's KV-cache groups over one pool: one for full attention, and one per window or chunk size.

    All groups have one block size, so a layer's K and V have the same shape in every group, and layers of different
    groups can share tensors. Layers that keep a state form another group. Ignore the plan's num_blocks, num_bytes and
    number of states, which `cache_size` chooses.

    state_dtype: the dtype of states, if it differs from that of K and V. Raises InvalidArgumentError for a block_size
    below 1.
    O(layers ** 2).
    """
    kinds = [replace(how.kind, block_size=block_size) for how in config.attention]
    different = list(dict.fromkeys(kinds))
    numbers = [different.index(kind) for kind in kinds]
    layers: list[KVLayer | LatentLayer] = (
        [KVLayer(number, config.num_kv_heads, config.head_dim) for number in numbers]
        if config.latent is None
        else [LatentLayer(number, config.latent.entry_dim * dtype.itemsize) for number in numbers]
    )
    if not config.has_states:
        return plan(different, layers, dtype.itemsize, _NO_LIMIT)
    states = [
        StateLayer(num_bytes) for num_bytes in state_bytes(config.mixers, dtype if state_dtype is None else state_dtype)
    ]
    return plan([*different, RecurrentState(block_size, 1)], layers, dtype.itemsize, _NO_LIMIT, states=states)


def watch_compiling(attention: AttentionBackend) -> AbstractContextManager[dict[str, float]]:
    """Measure compiling inside this context: seconds by Triton kernel. Empty for attention without Triton kernels."""
    if isinstance(attention, TorchAttention | FlashAttention):
        return nullcontext({})
    from kvblocks.engine.attention import triton_attention

    return triton_attention.watch_compiling()


@dataclass(frozen=True)
class Backend:
    """The options of how to run a model. attention: one of ATTENTIONS. cuda_graphs: whether decode steps are captured.

    kv_cache_dtype: one of KV_CACHE_DTYPES. scales: the factors of K and V in 8 bits, which `prepared` finds. Raises
    InvalidArgumentError for other names, and for options that can't be combined.
    """

    attention: str = "auto"
    deterministic: bool = False
    cuda_graphs: bool = True
    kv_cache_dtype: str = "auto"
    scales: KVScales | None = None

    def __post_init__(self) -> None:
        check_one_of("attention", self.attention, ATTENTIONS)
        if self.attention not in ("flash-attn", "flashinfer"):
            return
        if is_8_bit(self.kv_cache_dtype):
            raise InvalidArgumentError(f"attention={self.attention!r}: expected kv_cache_dtype='auto', got 8 bits")
        if self.deterministic:
            raise InvalidArgumentError(f"attention={self.attention!r}: expected deterministic=False, got True")

    def check_place(self, device: torch.device, block_size: int) -> None:
        """Raise InvalidArgumentError or ModelError for what can't work on this device, whatever the model.

        Called before weights are loaded, so that nobody waits for a model that can't run.
        """
        chosen, _ = self._choose(device, block_size)
        if chosen == "flash-attn":
            check_flash_attention(block_size, device)
        if chosen in ("triton", "flashinfer"):
            if find_spec("triton") is None:
                raise ModelError(
                    f"attention={chosen!r}: expected the package triton, got none: {pip_install('engine,gpu')}, or"
                    " use attention='torch'"
                )
            from kvblocks.engine.attention.triton_attention import check_8_bit, check_device

            check_device(block_size, device)
            if is_8_bit(self.kv_cache_dtype):
                check_8_bit(device)
        if chosen == "flashinfer":
            from kvblocks.engine.attention.flashinfer_attention import check_flashinfer

            check_flashinfer()

    def _choose(self, device: torch.device, block_size: int, model: LoadedModel | None = None) -> tuple[str, str]:
        """The name of the attention on a device, and why "auto" is torch on a GPU. model: None if it isn't known."""
        if self.attention != "auto" or device.type != "cuda":
            return ("torch" if self.attention == "auto" else self.attention), ""
        if model is not None and model.config.needs_torch:
            return "torch", f"the model has {model.config.needs_torch}"
        if find_spec("triton") is not None:
            from kvblocks.engine.attention.triton_attention import check_device, check_supported

            try:
                check_device(block_size, device)
                if model is not None:
                    check_supported(model.config, block_size, model.dtype, device)
            except InvalidArgumentError as error:
                return "torch", str(error)
        return "triton", ""

    def prepared(self, model: LoadedModel, block_size: int) -> "Backend":
        """This backend for a model, checked by `choose_attention`, and with scales if K and V are kept in 8 bits.

        Finding the scales computes up to 512 tokens. Logs a warning if "auto" has to be torch on a GPU.
        """
        self.choose_attention(model, block_size)
        _, why = self._choose(model.device, block_size, model)
        if why:
            logger.warning("attention='auto': plain torch, which is slower and has no CUDA graphs, since %s", why)
        return replace(self, scales=calibrate(model)) if is_8_bit(self.kv_cache_dtype) else self

    def plan_cache(self, model: LoadedModel, block_size: int) -> Plan:
        """Call the function `plan_cache` with the dtypes of the cache and of the model."""
        dtype = E4M3 if is_8_bit(self.kv_cache_dtype) else model.dtype
        return plan_cache(model.config, block_size, dtype, model.dtype)

    def choose_attention(self, model: LoadedModel, block_size: int) -> AttentionBackend:
        """The attention for this model. Raises InvalidArgumentError or ModelError, whose messages name alternatives."""
        chosen, _ = self._choose(model.device, block_size, model)
        if model.config.latent is not None and is_8_bit(self.kv_cache_dtype):
            raise InvalidArgumentError(
                f"kv_cache_dtype={self.kv_cache_dtype!r}: expected 'auto' for {model.config.architecture.name}, whose"
                " attention keeps latents in the place of K and V"
            )
        if chosen == "torch":
            return TiledTorchAttention() if self.deterministic else TorchAttention()
        if model.config.needs_torch:
            raise InvalidArgumentError(
                f"attention={chosen!r}: expected a model without {model.config.needs_torch}, which only"
                f" attention='torch' computes; got {model.config.architecture.name}"
            )
        self.check_place(model.device, block_size)
        if chosen == "flash-attn":
            return load_flash_attention(model.config, block_size, model.dtype, model.device)
        from kvblocks.engine.attention.triton_attention import TritonAttention, check_supported

        check_supported(model.config, block_size, model.dtype, model.device)
        if chosen == "flashinfer":
            from kvblocks.engine.attention.flashinfer_attention import load_flashinfer

            return load_flashinfer(model.dtype)
        return TritonAttention(is_tiled=self.deterministic)

    def make_runner(
        self, model: LoadedModel, manager: KVCacheManager, layer_locations: Sequence[LayerLocation] | None = None
    ) -> ModelRunner:
        """The runner for this model and the manager's blocks. Raises what `choose_attention` does, and ModelError.

        layer_locations: where in the blocks each layer keeps its KV; None: all layers are one group.
        For deterministic runs it first checks the machine, as `determinism` describes.
        """
        attention = self.choose_attention(model, manager.block_size)
        strategy = choose_determinism(model.config, model.weights) if self.deterministic else NATURAL
        computed = DecoderModel(
            model.config, model.weights, strategy=strategy, attention=attention, layer_locations=layer_locations
        )
        if isinstance(attention, TorchAttention):
            num_slots = manager.states.num_slots if model.config.has_states else 1
            sizes = (manager.num_blocks, manager.block_size)
            return ModelRunner(computed, *sizes, scales=self.scales, num_slots=num_slots)
        return self._make_device_runner(computed, manager)

    def _make_device_runner(self, model: DecoderModel, manager: KVCacheManager) -> ModelRunner:
        from kvblocks.engine.attention.cascade import CascadePlanner
        from kvblocks.engine.run.decode_step import GraphCapture
        from kvblocks.engine.run.device_runner import DeviceRunner

        sizes, device = (manager.num_blocks, manager.block_size), model.weights.embedding.device
        if isinstance(model.attention, FlashAttention):
            return DeviceRunner(model, *sizes)
        cascade = None
        full = [number for number, group in enumerate(manager.groups) if group.sees_all]
        # A cascade's bits depend on what is shared, so deterministic runs have none. Layers with windows don't use
        # cascades. Prefixes are shared in the primary group, the first one without a window.
        if full and not self.deterministic:
            config = model.config
            width = 1 if self.scales is not None else model.weights.embedding.element_size()
            token_bytes = 2 * config.num_kv_heads * config.head_dim * width
            found = manager.inspect.shared_prefixes
            cascade = CascadePlanner(found, manager.block_size, device, group=full[0], token_bytes=token_bytes)
        capture = GraphCapture() if device.type == "cuda" and self.cuda_graphs else None
        runner = DeviceRunner(model, *sizes, scales=self.scales, capture=capture, cascade=cascade)
        runner.draw_tokens = draws_on(device)
        return runner


def draws_on(device: torch.device) -> DrawTokens | None:
    """The kernel that draws tokens on a GPU. In the interpreter it takes a second for each."""
    if device.type != "cuda":
        return None
    from kvblocks.kernels.draw import draw_tokens

    def draw(logits: Tensor, parameters: Tensor) -> Tensor:
        with torch.cuda.device(device):  # kernels are launched on the current one, which may be another
            drawn: Tensor = draw_tokens(logits, parameters)
        return drawn

    return draw


def choose_device(device: str, loaded: torch.device | None = None) -> torch.device:
    """The device that `device` names. loaded: where the loaded model is, if any. Raises InvalidArgumentError."""
    if device == "auto":
        return loaded or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = torch.device("meta")
    if chosen.type not in {"cpu", "cuda"}:
        raise InvalidArgumentError(f"device: expected 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise InvalidArgumentError(f"device: expected one of {torch.cuda.device_count()} CUDA devices, got {device!r}")
    if loaded is not None and (chosen.type, chosen.index or 0) != (loaded.type, loaded.index or 0):
        raise InvalidArgumentError(f"device: expected {str(loaded)!r}, where the loaded model is, got {device!r}")
    return chosen
