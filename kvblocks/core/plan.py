"""How a model's layers share one pool of KV-cache memory, as numbers that a person can check. `plan` computes them.

One pool serves all groups, so a block has the same number of bytes in each. The layers of a group attend in the same
way; a kind's layers are spread over as many groups as needed. A group has at most as many layers as fit a block; the
room for one layer is called a *slot*. If a group has fewer layers than slots, or smaller layers, the rest of its blocks
is padding. Layers that keep a state (`StateLayer`) are a group of their own without block tables: the slots of their
live states are taken from the budget first, and a checkpoint of all of them takes as many blocks as its bytes need.

With more layers in a block there are fewer groups, hence less work for the manager and fewer tables, but perhaps more
padding. `plan` takes the largest blocks with no more than a given share of padding.

Groups of equal size over one pool, with padding, come from vLLM's hybrid KV-cache manager.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, SupportsFloat, SupportsIndex

from kvblocks.arguments import check_count, check_share, counted, is_a, listed, plain_text, wrong
from kvblocks.core.kinds import Group, RecurrentState
from kvblocks.core.layout import check_groups
from kvblocks.errors import InvalidArgumentError

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
    """A layer that keeps K and V of num_kv_heads x head_dim elements each for a token. kind: an index in `kinds`."""

    kind: int
    num_kv_heads: int
    head_dim: int


class LatentLayer(NamedTuple):
    """A layer that keeps a given number of bytes for each token, whatever the dtype. kind: an index in `kinds`.

    Multi-head latent attention keeps a latent of, say, 576 elements: 1,152 bytes in bfloat16. Add what lies beside it
    in the same block, such as 132 bytes of a sparse indexer, or make that a layer of its own.
    """

    kind: int
    bytes_per_token: int


class StateLayer(NamedTuple):
    """A layer that keeps one state per sequence. num_bytes: of one state, with all that the layer needs to go on."""

    num_bytes: int


@dataclass(frozen=True)
class Plan:
    """How a budget of KV-cache memory is used. All sizes are in bytes.

    - groups: for `KVCacheManager(num_blocks, groups=...)`.
    - group_layers: for each group, the numbers of its layers, in the order of their slots.
    - layer_bytes: for each group, how much of a block each of these layers takes.
    - block_bytes: the size of a block. num_blocks: how many blocks the pool has.
    - num_bytes: the budget.
    - padding: the share of the blocks' bytes that no layer uses, as a mean over the groups, 0.0 to 1.0.
    - state_bytes: the states of all layers that keep one, together; 0 if there are none.
    - slot_bytes: the slots for live states, which are outside the pool but part of the budget.
    """

    groups: tuple[Group, ...]
    group_layers: tuple[tuple[int, ...], ...]
    layer_bytes: tuple[tuple[int, ...], ...]
    block_bytes: int
    num_blocks: int
    num_bytes: int
    padding: float
    state_bytes: int = 0
    slot_bytes: int = 0

    @property
    def state_blocks(self) -> int:
        """How many blocks a checkpoint of all states takes. O(1)."""
        return -(-self.state_bytes // self.block_bytes)

    @property
    def block_size(self) -> int:
        """Tokens in a block of the primary group, by which hits and tiers count. O(groups)."""
        return check_groups(self.groups).block_size

    @property
    def used_bytes(self) -> tuple[int, ...]:
        """For each column of blocks (`BlockIdentity`), how many of a block's leading bytes are used.

        O(groups + parts of a state).
        """
        layout = check_groups(self.groups)
        used = [sum(sizes) for sizes in self.layer_bytes]
        columns = [used[side_group.group] for side_group in layout.side_groups for _ in range(side_group.num_columns)]
        parts = [self.block_bytes] * self.state_blocks
        if parts:  # the last part of a checkpoint has the rest
            parts[-1] -= self.state_blocks * self.block_bytes - self.state_bytes
        return (self.block_bytes if layout.primary is None else used[layout.primary], *columns, *parts)

    @property
    def layer_groups(self) -> tuple[tuple[int, int], ...]:
        """For each layer of the model, the number of its group and its slot there. O(layers)."""
        slots = {layer: (group, slot) for group, row in enumerate(self.group_layers) for slot, layer in enumerate(row)}
        return tuple([slots[layer] for layer in sorted(slots)])

    @property
    def num_slots(self) -> int:
        """The largest number of layers in a group. O(groups)."""
        return max([len(layers) for layers in self.group_layers])

    def blocks_of_sequence(self, num_tokens: SupportsIndex, num_step_tokens: SupportsIndex = 1) -> tuple[int, ...]:
        """Return the most blocks of each group that a sequence of `num_tokens` tokens holds at a time.

        num_step_tokens: the most tokens of it that one step computes. Raises InvalidArgumentError. O(groups).
        """
        return tuple([group.num_blocks(num_tokens, num_step_tokens) for group in self.groups])

    def num_sequences(self, num_tokens: SupportsIndex, num_step_tokens: SupportsIndex = 1) -> float:
        """Return how many sequences of `num_tokens` tokens fit at once if they share nothing. Raises
        InvalidArgumentError.

        num_step_tokens: as in `blocks_of_sequence`. O(groups).
        """
        check_count("num_tokens", num_tokens, 1)
        return self.num_blocks / sum(self.blocks_of_sequence(num_tokens, num_step_tokens))

    def table(
        self,
        contexts: Iterable[SupportsIndex] = (1024, 8192, 32_768, 131_072),
        num_step_tokens: SupportsIndex = 1,
    ) -> str:
        """Return the plan as text, with how many sequences of several lengths fit. Raises InvalidArgumentError."""
        lengths = [
            check_count("contexts", context, 1) for context in listed("contexts", "an iterable of ints", contexts)
        ]
        check_count("num_step_tokens", num_step_tokens, 1)
        used = self.num_blocks * self.block_bytes
        pool = f"{self.num_blocks} blocks of {self.block_bytes} bytes: {used} of {self.num_bytes} bytes"
        lines = [f"{pool}, {self.padding:.1%} of a block is padding on average"]
        lines.append("group  attention           block_size  layers  bytes a layer  layer numbers")
        for number, (group, layers, sizes) in enumerate(
            zip(self.groups, self.group_layers, self.layer_bytes, strict=True)
        ):
            size = "-".join(map(str, sorted({min(sizes, default=0), max(sizes, default=0)})))
            names = ", ".join([str(layer) for layer in layers])
            lines.append(f"{number:5}  {group.label:18}  {group.block_size:10}  {len(layers):6}  {size:>13}  {names}")
        if self.state_bytes:
            num_wasted = self.state_blocks * self.block_bytes - self.state_bytes
            lines.append(
                f"a state: {self.state_bytes} bytes, {self.state_blocks} blocks a checkpoint ({num_wasted} bytes are"
                f" padding); all slots: {self.slot_bytes} bytes"
            )
        lines.append("context tokens  blocks a sequence  sequences that fit")
        for context in lengths:
            num_blocks = sum(self.blocks_of_sequence(context, num_step_tokens))
            lines.append(f"{context:14}  {num_blocks:17}  {self.num_sequences(context, num_step_tokens):18.2f}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def plan(
    kinds: Iterable[Group],
    layers: Iterable[KVLayer | LatentLayer],
    dtype: str | SupportsIndex,
    num_bytes: SupportsIndex,
    *,
    max_padding: SupportsFloat = 0.1,
    states: Iterable[StateLayer] = (),
) -> Plan:
    """Return how to divide `num_bytes` of memory for the KV cache of a model.

    - kinds: how layers attend, with their block sizes. Layers that keep more bytes per token may have smaller blocks.
    - layers: the model's layers, in order. Layers of one kind may differ in their bytes and still share groups.
    - dtype: a name in DTYPE_BYTES, or the bytes of an element.
    - max_padding: the largest share of padding to accept for fewer groups, 0.0 to 1.0. If every way has more padding,
      the one with the least is taken.
    - states: the layers that keep a state. `kinds` must then include a `RecurrentState` whose num_slots is the number
      of sequences that run at once. The plan's groups have it with the number of blocks that a checkpoint takes.

    Raises InvalidArgumentError, also when not even one block of each group fits, or no checkpoint beside them. O(layers
    squared).
    """
    layout = check_groups(kinds)
    element_bytes = _element_bytes(dtype)
    budget = check_count("num_bytes", num_bytes, 1)
    most = check_share("max_padding", max_padding)
    state_bytes = _state_bytes(states, layout.state_kind)
    parts = _parts(layout.groups, layers, element_bytes)
    ways = [_deal(parts, num_bytes) for _, shares in parts for num_bytes, _ in shares]
    least = min([padding for padding, _, _ in ways])
    fitting = [way for way in ways if way[0] <= max(most, least)]
    padding, block_bytes, dealt = min(fitting, key=lambda way: (len(way[2]), way[0], way[1]))
    found = Plan(
        groups=tuple([layout.groups[kind] for kind, _ in dealt]),
        group_layers=tuple([tuple([number for number, _ in share]) for _, share in dealt]),
        layer_bytes=tuple([tuple([size for _, size in share]) for _, share in dealt]),
        block_bytes=block_bytes,
        num_blocks=budget // block_bytes,
        num_bytes=budget,
        padding=padding,
    )
    if layout.state_kind is not None:
        found = _with_states(found, layout.state_kind, state_bytes)
    least_bytes = block_bytes * (len(dealt) + found.state_blocks) + found.slot_bytes
    if found.num_blocks < len(dealt) + found.state_blocks:
        beside = f", {found.state_blocks} for a checkpoint, and the slots of states" if state_bytes else ""
        raise InvalidArgumentError(
            f"num_bytes: expected at least {least_bytes}, {counted(len(dealt), 'block')} (one for each group){beside},"
            f" got {budget}"
        )
    return found


def _with_states(found: Plan, kind: RecurrentState, state_bytes: int) -> Plan:
    """Return a plan with the group of the layers that keep a state, and with less memory for the pool."""
    slot_bytes = kind.num_slots * (1 + kind.num_kept) * state_bytes
    num_blocks = max(0, found.num_bytes - slot_bytes) // found.block_bytes
    more = replace(found, num_blocks=num_blocks, state_bytes=state_bytes, slot_bytes=slot_bytes)
    own = RecurrentState(kind.block_size, kind.num_slots, more.state_blocks, every=kind.every, num_kept=kind.num_kept)
    return replace(
        more,
        groups=(*found.groups, own),
        group_layers=(*found.group_layers, ()),
        layer_bytes=(*found.layer_bytes, ()),
    )


def _state_bytes(states: Iterable[Any], kind: RecurrentState | None) -> int:
    """Return the bytes of all states together. Raises InvalidArgumentError."""
    total = 0
    for given in listed("states", "StateLayer items", states, in_order=True):
        if not is_a(given, StateLayer):
            raise wrong("states", "StateLayer items", given)
        total += check_count("states: num_bytes", given[0], 1)
    if (kind is None) != (not total):
        got = "no layers" if not total else "no RecurrentState among the kinds"
        raise InvalidArgumentError(f"states: expected a RecurrentState among the kinds and layers for it, got {got}")
    return total


_Share = list[tuple[int, int]]
"""The layers of a group: (number, bytes of a block that it takes)."""
_Part = tuple[int, list[tuple[int, list[_Share]]]]
"""A kind, and for 1, 2, ... groups: (bytes of the fullest group's block, each group's layers)."""


def _parts(kinds: Sequence[Group], layers: Iterable[Any], element_bytes: int) -> list[_Part]:
    """Return the kinds that have layers, with all ways to share their layers out."""
    numbers: dict[int, dict[int, list[int]]] = {}  # by kind and bytes of a block
    for number, given in enumerate(listed("layers", "KVLayer or LatentLayer items", layers, in_order=True)):
        if is_a(given, LatentLayer):
            bytes_per_token = check_count("layers: bytes_per_token", given[1], 1)
        elif is_a(given, tuple) and len(given) == 3:
            num_heads = check_count("layers: num_kv_heads", given[1], 1)
            bytes_per_token = 2 * num_heads * check_count("layers: head_dim", given[2], 1) * element_bytes
        else:
            raise wrong("layers", "KVLayer or LatentLayer items", given)
        kind = check_count("layers: kind", given[0], 0, len(kinds) - 1)
        numbers.setdefault(kind, {}).setdefault(kinds[kind].layer_bytes(bytes_per_token), []).append(number)
    if not numbers:
        raise InvalidArgumentError("layers: expected at least one, got none")
    return [(kind, _share_out(sizes)) for kind, sizes in sorted(numbers.items())]


def _share_out(sizes: dict[int, list[int]]) -> list[tuple[int, list[_Share]]]:
    """Return all ways to share a kind's layers out, of every size as equally as possible. sizes: numbers by bytes."""
    ways = []
    for num_groups in range(1, max([len(numbers) for numbers in sizes.values()]) + 1):
        shares: list[_Share] = [[] for _ in range(num_groups)]
        for size, numbers in sizes.items():
            for group, share in enumerate(shares):
                first, end = group * len(numbers) // num_groups, (group + 1) * len(numbers) // num_groups
                share += [(number, size) for number in numbers[first:end]]
        ways.append((max(map(_num_bytes, shares)), [sorted(share) for share in shares]))
    return ways


def _num_bytes(share: _Share) -> int:
    return sum([size for _, size in share])


def _deal(parts: list[_Part], block_bytes: int) -> tuple[float, int, list[tuple[int, _Share]]]:
    """Distribute layers over groups with blocks of about `block_bytes`: each kind gets as few groups as possible.

    Returns (padding, bytes of a block, the kind and the layers of each group).
    """
    block_bytes = max([block_bytes, *[min(ways)[0] for _, ways in parts]])
    dealt: list[tuple[int, _Share]] = []
    for kind, ways in parts:
        shares = next(found for num_bytes, found in ways if num_bytes <= block_bytes)
        dealt += [(kind, share) for share in shares]
    used = [_num_bytes(share) for _, share in dealt]
    return 1 - sum(used) / (max(used) * len(dealt)), max(used), dealt


def _element_bytes(dtype: Any) -> int:
    if is_a(dtype, str):
        name = plain_text(dtype)
        if name not in DTYPE_BYTES:
            raise wrong("dtype", f"bytes of an element or one of {sorted(DTYPE_BYTES)}", name)
        return DTYPE_BYTES[name]
    return check_count("dtype", dtype, 1)
