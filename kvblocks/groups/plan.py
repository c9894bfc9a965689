"""How a model's layers share one pool of KV-cache memory, as numbers that a person can check. `plan` computes them.

One pool serves all groups, so a block has the same number of bytes in each. Layers of one kind attend in the same way.
They are distributed over as many groups as needed. A group has at most as many layers as fit a block; the room for a
layer is called a *slot*. If a group has fewer layers than slots, or smaller layers, the rest of its blocks is padding.

With more layers in a block there are fewer groups, so less work for the manager and fewer tables, but perhaps more
padding. So `plan` takes the largest blocks with no more than a given share of padding.

Groups of equal size over one pool, with padding, come from vLLM's hybrid KV-cache manager.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsFloat, SupportsIndex

from kvblocks.arguments import check_count, check_share, is_a, listed, plain_text, wrong
from kvblocks.errors import InvalidArgumentError
from kvblocks.groups.kinds import Group
from kvblocks.groups.layout import check_groups

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
"""Bytes of an element, by the dtype's name."""


class KVLayer(NamedTuple):
    """What a layer keeps for a token: K and V of num_kv_heads x head_dim elements each. kind: an index in `kinds`."""

    kind: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Plan:
    """How a budget of KV-cache memory is used.

    groups: for `KVCacheManager(num_blocks, groups=...)`. group_layers: by group, the numbers of its layers, in the
    order of their slots. layer_bytes: by group, bytes of a block that one layer takes. block_bytes: bytes of a block.
    num_blocks: blocks in the pool. num_bytes: the budget. padding: share of the blocks' bytes that no layer uses, as a
    mean over the groups, 0.0 to 1.0.
    """

    groups: tuple[Group, ...]
    group_layers: tuple[tuple[int, ...], ...]
    layer_bytes: tuple[int, ...]
    block_bytes: int
    num_blocks: int
    num_bytes: int
    padding: float

    @property
    def layer_groups(self) -> tuple[tuple[int, int], ...]:
        """For each layer of the model, its group and its slot there. O(layers)."""
        slots = {layer: (group, slot) for group, row in enumerate(self.group_layers) for slot, layer in enumerate(row)}
        return tuple([slots[layer] for layer in sorted(slots)])

    @property
    def num_slots(self) -> int:
        """The largest number of layers in a group. O(groups)."""
        return max([len(layers) for layers in self.group_layers])

    def blocks_of_sequence(self, num_tokens: SupportsIndex, num_step_tokens: SupportsIndex = 1) -> tuple[int, ...]:
        """Return how many blocks of each group a sequence of `num_tokens` holds at most.

        num_step_tokens: the most tokens that a step computes of it. Raises InvalidArgumentError. O(groups).
        """
        return tuple([group.num_blocks(num_tokens, num_step_tokens) for group in self.groups])

    def num_sequences(self, num_tokens: SupportsIndex, num_step_tokens: SupportsIndex = 1) -> float:
        """Return how many sequences of `num_tokens` fit at once if they share nothing. As `blocks_of_sequence`."""
        check_count("num_tokens", num_tokens, 1)
        return self.num_blocks / sum(self.blocks_of_sequence(num_tokens, num_step_tokens))

    def table(
        self,
        contexts: Iterable[SupportsIndex] = (1024, 8192, 32_768, 131_072),
        num_step_tokens: SupportsIndex = 1,
    ) -> str:
        """Return the plan as text, with how many sequences of some lengths fit. Raises InvalidArgumentError."""
        lengths = [
            check_count("contexts", context, 1) for context in listed("contexts", "an iterable of ints", contexts)
        ]
        check_count("num_step_tokens", num_step_tokens, 1)
        used = self.num_blocks * self.block_bytes
        pool = f"{self.num_blocks} blocks of {self.block_bytes} bytes: {used} of {self.num_bytes} bytes"
        lines = [f"{pool}, {self.padding:.1%} of a block is padding on average"]
        lines.append("group  attention         block_size  layers  bytes a layer  layer numbers")
        for number, (group, layers, size) in enumerate(
            zip(self.groups, self.group_layers, self.layer_bytes, strict=True)
        ):
            kind = "full" if group.window is None else f"window {group.window}"
            names = ", ".join([str(layer) for layer in layers])
            lines.append(f"{number:5}  {kind:16}  {group.block_size:10}  {len(layers):6}  {size:13}  {names}")
        lines.append("context tokens  blocks a sequence  sequences that fit")
        for context in lengths:
            num_blocks = sum(self.blocks_of_sequence(context, num_step_tokens))
            lines.append(f"{context:14}  {num_blocks:17}  {self.num_sequences(context, num_step_tokens):18.2f}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def plan(
    kinds: Iterable[Group],
    layers: Iterable[KVLayer],
    dtype: str | SupportsIndex,
    num_bytes: SupportsIndex,
    *,
    max_padding: SupportsFloat = 0.1,
) -> Plan:
    """Return how to divide `num_bytes` of memory for the KV cache of a model.

    kinds: how layers attend, with their block sizes. Layers that keep more bytes for a token may have smaller blocks.
    layers: the model's, in order. dtype: a name in DTYPE_BYTES, or bytes of an element. max_padding: the largest share
    of padding to accept for fewer groups, 0.0 to 1.0. If every way has more padding, the one with the least is taken.

    Raises InvalidArgumentError, also when not even one block of each group fits. O(layers squared).
    """
    kinds = check_groups(kinds).groups
    element_bytes = _element_bytes(dtype)
    budget = check_count("num_bytes", num_bytes, 1)
    most = check_share("max_padding", max_padding)
    parts = _parts(kinds, layers, element_bytes)
    ways = [_deal(parts, num_layers * part[1]) for part in parts for num_layers in range(1, len(part[2]) + 1)]
    least = min([padding for padding, _, _ in ways])
    fitting = [way for way in ways if way[0] <= max(most, least)]
    padding, block_bytes, dealt = min(fitting, key=lambda way: (len(way[2]), way[0], way[1]))
    if budget // block_bytes < len(dealt):
        least_bytes = block_bytes * len(dealt)
        raise InvalidArgumentError(
            f"num_bytes: expected at least {least_bytes}, a block for each of {len(dealt)} groups, got {budget}"
        )
    return Plan(
        groups=tuple([kinds[kind] for kind, _, _ in dealt]),
        group_layers=tuple([numbers for _, _, numbers in dealt]),
        layer_bytes=tuple([size for _, size, _ in dealt]),
        block_bytes=block_bytes,
        num_blocks=budget // block_bytes,
        num_bytes=budget,
        padding=padding,
    )


_Part = tuple[int, int, tuple[int, ...]]
"""Layers that may share groups: (their kind, bytes of a block that one takes, their numbers)."""


def _parts(kinds: Sequence[Group], layers: Iterable[KVLayer], element_bytes: int) -> list[_Part]:
    """Return the layers by kind and bytes a block."""
    numbers: dict[tuple[int, int], list[int]] = {}
    for number, given in enumerate(listed("layers", "KVLayer items", layers)):
        if not is_a(given, tuple) or len(given) != 3:
            raise wrong("layers", "KVLayer items", given)
        kind = check_count("layers: kind", given[0], 0, len(kinds) - 1)
        num_elements = check_count("layers: num_kv_heads", given[1], 1) * check_count("layers: head_dim", given[2], 1)
        size = 2 * num_elements * element_bytes * kinds[kind].block_size
        numbers.setdefault((kind, size), []).append(number)
    if not numbers:
        raise InvalidArgumentError("layers: expected at least one, got none")
    return [(kind, size, tuple(found)) for (kind, size), found in sorted(numbers.items())]


def _deal(parts: list[_Part], block_bytes: int) -> tuple[float, int, list[_Part]]:
    """Distribute layers over groups with blocks of about `block_bytes`. Returns (padding, bytes of a block, groups).

    Each part gets as few groups as possible, of sizes as equal as possible.
    """
    block_bytes = max([block_bytes, *[size for _, size, _ in parts]])
    dealt: list[_Part] = []
    for kind, size, numbers in parts:
        num_groups = -(-len(numbers) // (block_bytes // size))
        for group in range(num_groups):
            first, end = group * len(numbers) // num_groups, (group + 1) * len(numbers) // num_groups
            dealt.append((kind, size, numbers[first:end]))
    block_bytes = max([size * len(numbers) for _, size, numbers in dealt])
    used = sum([size * len(numbers) for _, size, numbers in dealt])
    return 1 - used / (block_bytes * len(dealt)), block_bytes, dealt


def _element_bytes(dtype: Any) -> int:
    if is_a(dtype, str):
        name = plain_text(dtype)
        if name not in DTYPE_BYTES:
            raise wrong("dtype", f"bytes of an element or one of {sorted(DTYPE_BYTES)}", name)
        return DTYPE_BYTES[name]
    return check_count("dtype", dtype, 1)
