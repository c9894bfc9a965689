"""Decides how many blocks and state slots an engine's KV cache has, from a number of blocks or an amount of memory."""

from collections.abc import Callable
from dataclasses import replace

import torch

from kvblocks import Plan, RecurrentState
from kvblocks.arguments import check_count, counted, is_a
from kvblocks.engine.run.memory import check_memory, read_memory, show_bytes
from kvblocks.errors import InvalidArgumentError

DEFAULT_KV_CACHE_BYTES = 512 * 2**20
"""The default size on a CPU, whose memory other programs use, too."""

DEFAULT_GPU_SHARE = 0.85
"""The default on a GPU: the share of the memory that is free once the model is loaded.

The cache and the steps share it.
"""

MAX_STATE_SLOTS = 64
"""The default for the most state slots: as many as sequences run at once by default."""


def size_cache(
    layout: Plan,
    num_blocks: int | None,
    kv_cache_memory: float | str | None,
    num_state_slots: int | None,
    device: torch.device,
    measure_steps: Callable[[], int] | None = None,
) -> Plan:
    """Return a layout of `plan_cache` with the number of blocks that the caller asks for.

    num_state_slots: how many live states to have room for, in models whose layers keep some; None: MAX_STATE_SLOTS, or
    as many as take no more memory than the blocks, but at least one. kv_cache_memory includes these slots; num_blocks
    doesn't. measure_steps: returns the bytes that steps take beside the cache. It is called only if the cache's memory
    is a share of a GPU's, which then includes these bytes. Raises InvalidArgumentError for bad values, and if more
    memory would be needed than is free.
    """
    if num_blocks is None and kv_cache_memory is None:
        kv_cache_memory = DEFAULT_GPU_SHARE if is_shared_with_steps(device) else DEFAULT_KV_CACHE_BYTES
    if num_state_slots is not None:
        check_count("num_state_slots", num_state_slots, 1)
        if not layout.state_bytes:
            raise InvalidArgumentError(
                f"num_state_slots: expected None for a model whose layers keep no states, got {num_state_slots}"
            )
    if num_blocks is not None:
        if kv_cache_memory is not None:
            raise InvalidArgumentError(
                f"expected num_blocks or kv_cache_memory, got both: {num_blocks} and {kv_cache_memory!r}"
            )
        pool = check_count("num_blocks", num_blocks, 1) * layout.block_bytes
        sized = _with_slots(layout, num_state_slots, pool)
        budget = pool + sized.slot_bytes
    else:
        assert kv_cache_memory is not None
        budget = _read_budget(kv_cache_memory, device, measure_steps)
        sized = _with_slots(layout, num_state_slots, budget // 2)
        num_groups = len([group for group in layout.groups if group.has_table])
        least = layout.block_bytes * num_groups + sized.slot_bytes
        if budget < least:
            beside = f", and {sized.slot_bytes} bytes for states" if sized.slot_bytes else ""
            raise InvalidArgumentError(
                f"kv_cache_memory: expected at least {least} bytes, {counted(num_groups, 'block')} (one for each"
                f" group of layers){beside}, got {budget}"
            )
    chosen = replace(sized, num_blocks=(budget - sized.slot_bytes) // layout.block_bytes, num_bytes=budget)
    if not is_a(kv_cache_memory, float):  # a share of the free memory needs no check
        name = "kv_cache_memory" if num_blocks is None else "num_blocks"
        check_memory(name, chosen.num_bytes, chosen.num_blocks, device)
    return chosen


def is_shared_with_steps(device: torch.device) -> bool:
    """Whether a share of the device's memory must also cover what steps take: True on a GPU."""
    return device.type == "cuda"


def _read_budget(memory: float | str, device: torch.device, measure_steps: Callable[[], int] | None) -> int:
    """The bytes of the cache. Raises InvalidArgumentError for a share that leaves it none."""
    budget = read_memory(memory, device)
    if measure_steps is None or not is_a(memory, float) or not is_shared_with_steps(device):
        return budget
    taken = measure_steps()
    if taken >= budget:
        raise InvalidArgumentError(
            f"kv_cache_memory: expected a share of more than {show_bytes(taken)} of the memory of {device}, since the"
            f" largest steps take so much besides the cache; got {memory}, which is {show_bytes(budget)}. Steps with"
            " smaller limits take less"
        )
    return budget - taken


def _with_slots(layout: Plan, num_slots: int | None, num_bytes: int) -> Plan:
    """Return the layout with `num_slots` slots for states; None: as many as fit into `num_bytes`."""
    if not layout.state_bytes:
        return layout
    if num_slots is None:
        num_slots = max(1, min(MAX_STATE_SLOTS, num_bytes // layout.state_bytes))
    groups = [
        RecurrentState(group.block_size, num_slots, group.checkpoint_blocks)
        if isinstance(group, RecurrentState)
        else group
        for group in layout.groups
    ]
    return replace(layout, groups=tuple(groups), slot_bytes=num_slots * layout.state_bytes)
