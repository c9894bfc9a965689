"""Blocks, pool and tables as vLLM's schedulers, connectors and tests read them directly."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks

from kvblocks import BlockHold, CacheHit, Group, InvalidArgumentError, KVCacheBlock, Sequence
from kvblocks.integrations.vllm.events import NamedBlocks

Tables = tuple[Items[KVCacheBlock | None], ...]


class BlockView:
    """A block with vLLM's attribute names. Views of the same block are equal."""

    __slots__ = ("_block", "block_id", "is_null")

    def __init__(self, block: KVCacheBlock | None) -> None:
        self._block = block
        self.block_id = 0 if block is None else block.block_id
        self.is_null = block is None

    @property
    def ref_cnt(self) -> int:
        """The number of its owners."""
        return 0 if self._block is None else self._block.ref_cnt

    @property
    def block_hash(self) -> bytes | None:
        """Its digest; None unless it is cached."""
        return None if self._block is None else self._block.block_hash

    _block_hash = block_hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockView) and other.block_id == self.block_id

    def __hash__(self) -> int:
        return hash(self.block_id)

    def __repr__(self) -> str:
        return f"BlockView({self._block!r})"


NULL_BLOCK = BlockView(None)


def views(blocks: Items[KVCacheBlock | None]) -> list[BlockView]:
    """Return views of blocks; None becomes the null block."""
    return [NULL_BLOCK if block is None else BlockView(block) for block in blocks]


class GivenBlocks(KVCacheBlocks):
    """Blocks by group, in vLLM's class. Usually only ids are needed, so views are made on demand."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    @property
    def blocks(self) -> tuple[list[BlockView], ...]:
        """The blocks' views, by group."""
        return tuple(views(table) for table in self.tables)

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Items[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Return the blocks' ids by group, 0 for those that left a window; None if there are none and `allow_none`."""
        tables = self.tables if group_ids is None else [self.tables[group] for group in group_ids]
        if allow_none and not any(tables):
            return None
        return tuple([0 if block is None else block.block_id for block in table] for table in tables)

    def new_empty(self) -> KVCacheBlocks:
        """Return an object without blocks, for as many groups."""
        return GivenBlocks(tuple(() for _ in self.tables))


class NoBlocks(GivenBlocks):
    """No blocks in any group: what most decodes get."""

    def __init__(self, num_groups: int) -> None:
        super().__init__(tuple(() for _ in range(num_groups)))

    def get_block_ids(self, allow_none: bool = False, *, group_ids: Items[int] | None = None) -> Any:
        """Return None if `allow_none`, else empty lists."""
        return None if allow_none else super().get_block_ids(group_ids=group_ids)


class HitBlocks(GivenBlocks):
    """The blocks that a lookup found. hit: kvblocks' hit."""

    def __init__(self, hit: CacheHit, num_groups: int) -> None:
        super().__init__(tuple(hit.group_blocks(group) for group in range(num_groups)))
        self.hit = hit


def given_hit(blocks: GivenBlocks | None, num_tokens: int) -> CacheHit | None:
    """Return the hit if `blocks` came from a lookup, else None. num_tokens: the hit's. Raises InvalidArgumentError."""
    hit = blocks.hit if isinstance(blocks, HitBlocks) else None
    num_hit = 0 if hit is None else hit.num_readonly_tokens
    if num_hit != num_tokens:
        raise InvalidArgumentError(f"num_new_computed_tokens: expected the hit's {num_hit}, got {num_tokens}")
    return hit


class TableBlocks(GivenBlocks):
    """All blocks of a sequence."""

    def __init__(self, sequence: Sequence, num_groups: int) -> None:
        self._sequence = sequence
        self._num_groups = num_groups

    @property
    def tables(self) -> Tables:  # type: ignore[override]
        """The blocks by group; None for those that left a window."""
        return tuple(self._sequence.group_blocks(group) for group in range(self._num_groups))

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Items[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Return copies of the tables' ids."""
        groups = range(self._num_groups) if group_ids is None else group_ids
        ids = tuple(self._sequence.group_block_ids(group).copy() for group in groups)
        return None if allow_none and not any(ids) else ids


class TablesView:
    """A group's block tables by request id, for connectors and tests that read them."""

    def __init__(self, sequences: dict[str, Sequence], group: int) -> None:
        self._sequences = sequences
        self._group = group

    def _held(self) -> dict[str, list[BlockView]]:
        held = {name: s.group_blocks(self._group) for name, s in self._sequences.items() if s.is_allocated}
        return {name: views(blocks) for name, blocks in held.items()}

    def __getitem__(self, request_id: str) -> list[BlockView]:
        return self._held().get(request_id, [])

    def get(self, request_id: str, default: Any = None) -> Any:
        """Return a request's blocks; `default` if it has none."""
        return self._held().get(request_id, default)

    def items(self) -> Any:
        """Return the pairs of request ids and blocks."""
        return self._held().items()

    def values(self) -> Any:
        """Return the blocks of each request that has any."""
        return self._held().values()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._held()

    def __len__(self) -> int:
        return len(self._held())

    def __iter__(self) -> Iterator[str]:
        return iter(self._held())


class CachedCounts:
    """The number of cached blocks by request id, for requests that have any."""

    def __init__(self, sequences: dict[str, Sequence]) -> None:
        self._sequences = sequences

    def _counts(self) -> dict[str, int]:
        return {name: s.num_cached_blocks for name, s in self._sequences.items() if s.is_allocated}

    def __getitem__(self, request_id: str) -> int:
        return self._counts()[request_id]

    def get(self, request_id: str, default: Any = None) -> Any:
        """Return a request's number; `default` if it has no blocks."""
        return self._counts().get(request_id, default)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._counts()

    def __len__(self) -> int:
        return len(self._counts())


class PoolView:
    """What vLLM reads from `kv_cache_manager.block_pool`. manager: kvblocks'.

    named: what is cached, by vLLM's hashes.
    """

    def __init__(self, manager: Any, num_gpu_blocks: int, hash_block_size: int, named: NamedBlocks) -> None:
        self._manager = manager
        self._named = named
        self.num_gpu_blocks = num_gpu_blocks
        self.hash_block_size = hash_block_size
        self.null_block = NULL_BLOCK

    @property
    def blocks(self) -> list[BlockView]:
        """All blocks by id, the null block first."""
        return [self.null_block, *map(BlockView, self._manager.blocks)]

    @property
    def free_block_queue(self) -> "PoolView":
        """The object to ask for the number of free blocks, which is this one."""
        return self

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks without owners."""
        return self.get_num_free_blocks()

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks without owners."""
        number: int = self._manager.num_free_blocks
        return number

    def get_usage(self) -> float:
        """Return the share of blocks that have owners, 0.0 to 1.0."""
        total = self._manager.num_blocks
        return 1.0 - self._manager.num_free_blocks / total if total else 0.0

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: Items[int]) -> bool | None:
        """Return True if these groups have a cached block with this hash, else None. (vLLM's own returns the blocks.)

        Only vLLM's return of cached tokens' experts asks for this (`early.asks_for_hashes`).
        """
        return all(self._named.has(block_hash, group) for group in kv_cache_group_ids) or None

    def free_blocks(self, ordered_blocks: Iterable[BlockHold]) -> None:
        """Give back what `pop_blocks_for_free` returned."""
        for hold in ordered_blocks:
            self._manager.holds.release(hold)


class UnusedCalls:
    """Calls of vLLM's KVCacheManager that do nothing here, and properties that are always the same."""

    mamba_shared_prefix_checkpoint = False  # states are at the ends of blocks alone
    retained_hit_group_ids: tuple[int, ...] = ()

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Do nothing, since windows slide when their sequence gets slots."""

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """Return no copies, since hits end at block boundaries."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """Return no states for connectors."""
        return {}

    def finalize_partial_tail_offloads(self, request: Any) -> list[Any]:  # noqa: ARG002
        """Return no states for connectors."""
        return []


def make_coordinator(
    config: Any, groups: list[Group], sequences: dict[str, Sequence], *, block_pool: PoolView, **what: Any
) -> Any:
    """Make what vLLM reads from its coordinator: a record for each group, and other properties."""
    records = [
        SimpleNamespace(
            block_size=group.block_size if group.has_tokens else given.kv_cache_spec.block_size,
            kv_cache_spec=given.kv_cache_spec,
            kv_cache_group_id=number,
            req_to_blocks=TablesView(sequences, number),
            num_cached_block=CachedCounts(sequences),
            block_pool=block_pool,
            _null_block=block_pool.null_block,
        )
        for number, (group, given) in enumerate(zip(groups, config.kv_cache_groups, strict=True))
    ]
    return SimpleNamespace(
        single_type_managers=tuple(records),
        block_pool=block_pool,
        full_attention_group_id=next((number for number, group in enumerate(groups) if group.sees_all), None),
        enable_partial_hash_hits=False,
        num_reprefillable_tokens=0,
        **what,
    )
