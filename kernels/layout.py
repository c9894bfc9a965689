"""The shapes, dtypes and strides of tensors that the kernels support, and the checks of arguments.

Checks only look at a tensor's shape, dtype, strides and device, never at its values. To read a value from a GPU, the
host would have to wait for the GPU, which no call may do. So block ids, lengths and slots aren't checked.

A cache of K or of V is [num_blocks, block_size, num_kv_heads, head_dim] with a last stride of 1 and any other strides,
so a cache of [num_blocks, num_kv_heads, block_size, head_dim] works if it is transposed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes of queries. K and V have the query's dtype, or `FP8`."""

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest e4m3 number, which is stored for larger numbers."""

FP8_CAPABILITY = (8, 9)
"""The first CUDA compute capability that converts e4m3."""

HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)


class KernelArgumentError(ValueError):
    """An argument isn't supported. Nothing was launched, and nothing has changed."""


@dataclass(frozen=True)
class CacheShape:
    """The shape that the caches of K and of V share."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of one call of attention over a paged cache."""

    num_rows: int
    num_heads: int
    num_seqs: int
    max_blocks: int
    cache: CacheShape

    @property
    def group_size(self) -> int:
        """Query heads that share a head of K and V."""
        return self.num_heads // self.cache.num_kv_heads


@dataclass(frozen=True)
class AttentionOptions:
    """What happens between the dot products and the softmax.

    A score is `scale * (q . k)`; then `softcap * tanh(score / softcap)` if there is a softcap. A row at position p sees
    the keys from p - window + 1 to p, or all up to p without a window. `sinks`, one per query head, are scores without
    a value: exp(sink) is added to the denominator of the softmax. `k_scale` and `v_scale`, fp32 [num_kv_heads] on the
    device, are the factors of K and V of each head; None stands for 1.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def is_interpreted() -> bool:
    """Whether kernels that are defined from now on run in Triton's interpreter, on CPU tensors. Needs triton.

    Raises ImportError if so and the interpreter doesn't work with the installed numpy.
    """
    import triton

    if not triton.knobs.runtime.interpret:
        return False
    from triton.runtime import interpreter

    check_interpreter(triton.__version__, interpreter.np.__version__)
    return True


def check_interpreter(triton_version: str, numpy_version: str) -> None:
    """Raise ImportError for versions that don't work together in Triton's interpreter.

    Triton 3.6 takes numbers from arrays of one element, which numpy 2.4 no longer allows. Compiled kernels need no
    numpy.
    """
    triton_release, numpy_release = (
        tuple(int(part) for part in one.split(".")[:2]) for one in (triton_version, numpy_version)
    )
    if triton_release < (3, 7) and numpy_release >= (2, 4):
        raise ImportError(
            "TRITON_INTERPRET: expected triton 3.7 or newer, or numpy below 2.4, in Triton's interpreter, got triton"
            f" {triton_version} and numpy {numpy_version}"
        )


def check_cache(key_cache: Tensor, value_cache: Tensor) -> CacheShape:
    """Return the shape of a pair of caches. Raises KernelArgumentError if it isn't supported."""
    _check_dims("key_cache", key_cache, 4)
    check_dtype("key_cache", key_cache, (*QUERY_DTYPES, FP8))
    check_shape("value_cache", value_cache, tuple(key_cache.shape))
    check_dtype("value_cache", value_cache, (key_cache.dtype,))
    check_devices(key_cache=key_cache, value_cache=value_cache)
    shape = CacheShape(*key_cache.shape)
    if shape.num_blocks < 1 or shape.num_kv_heads < 1:
        raise KernelArgumentError(f"key_cache: expected at least one block and one head, got {tuple(key_cache.shape)}")
    if shape.block_size not in BLOCK_SIZES:
        raise KernelArgumentError(f"key_cache: expected a block_size among {BLOCK_SIZES}, got {shape.block_size}")
    if shape.head_dim not in HEAD_DIMS:
        raise KernelArgumentError(f"key_cache: expected a head_dim among {HEAD_DIMS}, got {shape.head_dim}")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_last_stride(name, cache)
        if cache.dtype == FP8:
            check_fp8_device(cache.device)
            check_pairs(name, cache)
    return shape


def check_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    options: AttentionOptions,
) -> AttentionShape:
    """Return the sizes of a call of attention.

    query: [num_rows, num_heads, head_dim]; caches: see `check_cache`; block_tables: int32 [num_seqs, max_blocks];
    seq_lens: int32 [num_seqs]. The caller checks which rows belong to which sequence. Raises KernelArgumentError.
    """
    cache = check_cache(key_cache, value_cache)
    _check_dims("query", query, 3)
    check_dtype("query", query, QUERY_DTYPES if key_cache.dtype == FP8 else (key_cache.dtype,))
    num_rows, num_heads, head_dim = query.shape
    if head_dim != cache.head_dim:
        raise KernelArgumentError(f"query: expected the caches' head_dim of {cache.head_dim}, got {head_dim}")
    if num_heads < 1 or num_heads % cache.num_kv_heads:
        raise KernelArgumentError(f"query: expected heads in multiples of {cache.num_kv_heads}, got {num_heads}")
    check_last_stride("query", query)
    _check_dims("block_tables", block_tables, 2)
    check_dtype("block_tables", block_tables, (torch.int32,))
    check_last_stride("block_tables", block_tables)
    num_seqs, max_blocks = block_tables.shape
    check_indices("seq_lens", seq_lens, num_seqs)
    check_devices(query=query, key_cache=key_cache, block_tables=block_tables, seq_lens=seq_lens)
    check_options(options, num_heads, query.device)
    check_scales(options.k_scale, options.v_scale, cache, query.device)
    return AttentionShape(num_rows, num_heads, num_seqs, max_blocks, cache)


def check_options(options: AttentionOptions, num_heads: int, device: torch.device) -> None:
    """Raise KernelArgumentError for options that no kernel supports."""
    if not (math.isfinite(options.scale) and options.scale > 0):
        raise KernelArgumentError(f"scale: expected a number above 0, got {options.scale}")
    if options.softcap is not None and not (math.isfinite(options.softcap) and options.softcap > 0):
        raise KernelArgumentError(f"softcap: expected None or a number above 0, got {options.softcap}")
    if options.window is not None and options.window < 1:
        raise KernelArgumentError(f"window: expected None or at least 1, got {options.window}")
    if options.sinks is not None:
        check_shape("sinks", options.sinks, (num_heads,))
        check_dtype("sinks", options.sinks, QUERY_DTYPES)
        check_last_stride("sinks", options.sinks)
        if options.sinks.device != device:
            raise KernelArgumentError(f"sinks: expected the device of query, {device}, got {options.sinks.device}")


def check_scales(k_scale: Tensor | None, v_scale: Tensor | None, shape: CacheShape, device: torch.device) -> None:
    """Raise KernelArgumentError unless the scales of K and V have a supported form, and are both given or both None."""
    if (k_scale is None) != (v_scale is None):
        raise KernelArgumentError(f"expected k_scale and v_scale or neither, got {k_scale} and {v_scale}")
    for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scales is None:
            continue
        check_indices(name, scales, shape.num_kv_heads, torch.float32)
        if scales.device != device:
            raise KernelArgumentError(f"{name}: expected the device of the caches, {device}, got {scales.device}")


def check_indices(name: str, tensor: Tensor, length: int, dtype: torch.dtype = torch.int32) -> None:
    """Raise KernelArgumentError unless `tensor` is a contiguous vector of `length` numbers of `dtype`."""
    check_shape(name, tensor, (length,))
    check_dtype(name, tensor, (dtype,))
    check_last_stride(name, tensor)


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise KernelArgumentError unless `tensor` has exactly this shape."""
    if tuple(tensor.shape) != expected:
        raise KernelArgumentError(f"{name}: expected the shape {expected}, got {tuple(tensor.shape)}")


def check_dtype(name: str, tensor: Tensor, expected: Sequence[torch.dtype]) -> None:
    """Raise KernelArgumentError unless `tensor` has one of these dtypes."""
    if tensor.dtype not in expected:
        names = " or ".join(str(dtype) for dtype in expected)
        raise KernelArgumentError(f"{name}: expected {names}, got {tensor.dtype}")


def check_last_stride(name: str, tensor: Tensor) -> None:
    """Raise KernelArgumentError unless the elements of the last dimension are adjacent."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise KernelArgumentError(f"{name}: expected a last stride of 1, got strides {tuple(tensor.stride())}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise KernelArgumentError unless `tensor` is contiguous."""
    if not tensor.is_contiguous():
        raise KernelArgumentError(f"{name}: expected a contiguous tensor, got strides {tuple(tensor.stride())}")


def check_devices(**tensors: Tensor) -> None:
    """Raise KernelArgumentError unless all these tensors are on the device of the first one, where kernels launch."""
    (first_name, first), *others = tensors.items()
    if first.device.type == "cuda" and first.device.index != torch.cuda.current_device():
        raise KernelArgumentError(
            f"{first_name}: expected the current device, cuda:{torch.cuda.current_device()}, got {first.device}"
        )
    for name, tensor in others:
        if tensor.device != first.device:
            raise KernelArgumentError(
                f"{name}: expected the device of {first_name}, {first.device}, got {tensor.device}"
            )


def check_pairs(name: str, cache: Tensor) -> None:
    """Raise KernelArgumentError unless pairs of e4m3 numbers are at even addresses, as kernels read them."""
    if cache.data_ptr() % 2 or any(stride % 2 for stride in cache.stride()[:3]):
        raise KernelArgumentError(
            f"{name}: expected an even address and even strides for {FP8}, got strides {tuple(cache.stride())}"
        )


def check_fp8_device(device: torch.device) -> None:
    """Raise KernelArgumentError for a GPU that cannot convert e4m3."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability < FP8_CAPABILITY:
        got = torch.cuda.get_device_name(device)
        wanted = ".".join(map(str, FP8_CAPABILITY))
        raise KernelArgumentError(f"expected CUDA's compute capability {wanted} or newer for {FP8}, got {got}")


def _check_dims(name: str, tensor: Tensor, expected: int) -> None:
    if tensor.dim() != expected:
        raise KernelArgumentError(f"{name}: expected {expected} dimensions, got the shape {tuple(tensor.shape)}")
