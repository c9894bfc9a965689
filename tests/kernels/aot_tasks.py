"""What aot.py compiles: every entry of the kernels' table, and the kernels that have none once for each vendor.

Entries are compiled as they are launched for 32 query heads, 8 heads of K and V and blocks of 16. An entry under "any"
is compiled for each target that has none of its own, and for sm89, which stands for all targets that are not listed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from kvblocks.kernels import table

TARGETS = ("sm80", "sm89", "sm90", "sm100", "gfx942")
FP8_TARGETS = ("sm89", "sm90", "sm100", "gfx942")
POINTERS = {"fp32": "*fp32", "fp16": "*fp16", "bf16": "*bf16", "fp8": "*fp8e4nv"}
FLAGS = ("HAS_SOFTCAP", "HAS_WINDOW", "HAS_SINKS")


@dataclass(frozen=True)
class Compilation:
    """One kernel for one target: `types` of what is neither a constant nor an int32, and the constants."""

    name: str
    target: str
    module: str
    function: str
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int


def all_tasks() -> Iterator[Compilation]:
    """Every compilation once."""
    seen: set[str] = set()
    for make in (extend_tasks, prefix_tasks, decode_tasks, plain_tasks):
        for task in make():
            what = repr((task.target, task.function, task.types, task.constants, task.num_warps))
            if what not in seen:
                seen.add(what)
                yield task


def entries(kernel: str) -> Iterator[tuple[str, int, int, Any]]:
    """(target, head_dim, bytes of K's elements, launch) of all that the table makes of a kernel on our targets."""
    launches = getattr(table, kernel)
    for target in TARGETS:
        for head_dim, element_bytes in product((64, 128, 256), (1, 2, 4)):
            if element_bytes > 1 or target in FP8_TARGETS:
                found = launches.get((target, head_dim, element_bytes))
                yield target, head_dim, element_bytes, found or launches["any", head_dim, element_bytes]


def attention_types(element_bytes: int) -> dict[str, str]:
    """Types of an attention kernel's arguments, by the width of K's elements; int32 is what is not listed."""
    query, cache = {1: ("bf16", "fp8"), 2: ("bf16", "bf16"), 4: ("fp32", "fp32")}[element_bytes]
    types = dict.fromkeys(("query_ptr", "output_ptr", "sink_ptr"), POINTERS[query])
    types |= dict.fromkeys(("k_ptr", "v_ptr"), POINTERS[cache])
    types |= dict.fromkeys(("scale", "softcap", "v_scale"), "fp32")
    types |= dict.fromkeys(("lse_ptr", "part_ptr", "part_lse_ptr"), "*fp32")
    indices = ("table_ptr", "start_ptr", "len_ptr", "members_ptr", "run_start_ptr", "run_stop_ptr", "level_ptr")
    return types | dict.fromkeys(indices, "*i32")


def attention_constants(launch: Any, head_dim: int) -> dict[str, Any]:
    """Constants that all attention kernels share."""
    sizes = {"GROUP": 4, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "TILE_N": launch.tile_keys}
    return sizes | {"STAGES": launch.num_stages, "HAS_SOFTCAP": False, "INTERPRETED": False}


def extend_tasks() -> Iterator[Compilation]:
    """`extend`, plain; for head_dim 128 with all options, and batch-invariant, too."""
    variants = {"": (False, False), " with options": (True, False), " with rows independent": (False, True)}
    for kernel, (variant, (has_options, is_uniform)) in product(("EXTEND", "EXTEND_NARROW"), variants.items()):
        for target, head_dim, element_bytes, launch in entries(kernel):
            if variant and (kernel, head_dim, element_bytes) != ("EXTEND", 128, 2):
                continue
            constants = attention_constants(launch, head_dim) | {"TILE_M": launch.tile_rows}
            yield Compilation(
                f"{kernel.lower()}{variant}, {head_dim} x {element_bytes} bytes",
                target,
                *("extend", "extend_kernel"),
                attention_types(element_bytes),
                constants | dict.fromkeys(FLAGS, has_options) | {"UNIFORM": is_uniform},
                launch.num_warps,
            )


def prefix_tasks() -> Iterator[Compilation]:
    """`prefix_decode`, plain; for head_dim 128 with softcap too."""
    for target, head_dim, element_bytes, launch in entries("PREFIX_DECODE"):
        constants = attention_constants(launch, head_dim) | {"TILE_M": launch.tile_rows, "NUM_HEADS": 32}
        types = attention_types(element_bytes) | {"output_ptr": "*fp32"}
        for has_softcap in (False, True) if (head_dim, element_bytes) == (128, 2) else (False,):
            yield Compilation(
                f"prefix_decode{' with softcap' if has_softcap else ''}, {head_dim} x {element_bytes} bytes",
                target,
                *("prefix_decode", "prefix_kernel"),
                types,
                constants | {"HAS_SOFTCAP": has_softcap},
                launch.num_warps,
            )


def decode_tasks() -> Iterator[Compilation]:
    """`decode`, stream-K for every entry; its splits of fixed size, and all options, for head_dim 128."""
    for target, head_dim, element_bytes, launch in entries("DECODE"):
        constants = attention_constants(launch, head_dim) | {"TILE_M": 16} | dict.fromkeys(FLAGS, False)
        grid = {"MAX_SEQS": 64, "NUM_KV_HEADS": 8}
        variants: list[tuple[str, dict[str, Any]]] = [("stream", grid)]
        if (head_dim, element_bytes) == (128, 2):
            options = dict.fromkeys(FLAGS, True)
            variants += [("stream with options", grid | options), ("split with options", options)]
        for variant, more in variants:
            yield Compilation(
                f"decode {variant}, {head_dim} x {element_bytes} bytes",
                target,
                *("decode_kernels", f"{variant.split()[0]}_kernel"),
                attention_types(element_bytes),
                constants | more,
                launch.num_warps,
            )


def plain_tasks() -> Iterator[Compilation]:
    """The kernels without an entry in the table, for head_dim 128 and bf16."""
    merge = dict.fromkeys(("first", "first_lse", "second", "second_lse", "output", "lse"), "*fp32")
    merge = {f"{name}_ptr": pointer for name, pointer in merge.items()} | {"output_ptr": "*bf16"}
    shared = attention_types(2) | {"own_ptr": "*fp32", "own_lse_ptr": "*fp32", "num_shared_ptr": "*i32"}
    own = dict.fromkeys(("table_ptr", "len_ptr", "num_shared_ptr", "own_table_ptr", "own_len_ptr"), "*i32")
    head = {"GROUP": 4, "HEAD_DIM": 128, "HAS_WINDOW": True, "HAS_SINKS": True}
    stream = head | {"MAX_SEQS": 64, "NUM_KV_HEADS": 8, "TILE_N": 64}
    store = dict.fromkeys(("key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr"), "*bf16") | {"slot_ptr": "*i64"}
    stored = dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), "*u8") | {"k_scale": "fp32", "v_scale": "fp32"}
    tile = {"NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "TILE_HEADS": 8}
    pages = dict.fromkeys(("address_ptr", "pair_ptr", "id_ptr", "staging_ptr"), "*i64")
    kernels = [
        ("merge", "merge_kernel", merge, {"HEAD_DIM": 128, "TILE_HEADS": 4}),
        ("cascade", "merge_shared_kernel", shared, {"HEAD_DIM": 128, "TILE_HEADS": 4}),
        ("cascade", "own_parts_kernel", own, {"BLOCK_SIZE": 16, "CHUNK": 256}),
        ("decode_kernels", "stream_merge_kernel", attention_types(2), stream),
        ("decode_kernels", "split_merge_kernel", attention_types(2), head),
        ("store", "store_kernel", store | {"k_scale": "fp32", "v_scale": "fp32"}, tile | {"QUANTISED": False}),
        ("store", "store_kernel", store | stored, tile | {"QUANTISED": True}),
        ("copy", "copy_kernel", pages, {"CHUNK": 1024}),
        ("copy", "stage_kernel", pages, {"CHUNK": 1024, "GATHERING": True}),
        ("copy", "stage_kernel", pages, {"CHUNK": 1024, "GATHERING": False}),
    ]
    for target, (module, function, types, constants) in product(("sm90", "gfx942"), kernels):
        yield Compilation(f"{function} {constants}", target, module, function, types, constants, num_warps=4)
