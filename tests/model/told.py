"""What an observer knows from events, by medium and group; and what is cached according to the prefix indexes."""

from dataclasses import dataclass, field
from typing import Any

from kvblocks import AllBlocksCleared, BlockRemoved, BlocksHit, BlockStored, KVCacheManager
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.hashing.extra_keys import decode_salt_and_lora
from kvblocks.tiers.prefix import prefix_of

Key = tuple[str, int | None, bytes]
"""Medium, group and name."""

Content = tuple[Any, ...]
"""Parent's name, tokens, extra keys, salt and LoRA name of a block."""


@dataclass
class Told:
    """Replays a manager's events."""

    blocks: dict[Key, Content] = field(default_factory=dict)
    num_hits: int = 0
    num_removed_below: int = 0

    def replay(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                continue
            keys = [(event.medium, event.group_idx, name) for name in event.block_hashes]
            if isinstance(event, BlockStored):
                self.store(event, keys)
            elif isinstance(event, BlockRemoved):
                self.num_removed_below += event.medium != "GPU"
                for key in keys:
                    del self.blocks[key]
            else:
                assert isinstance(event, BlocksHit) and event.sequence_id is not None
                assert keys and all(key in self.blocks for key in keys), "a hit of what isn't cached"
                self.num_hits += 1

    def store(self, event: BlockStored, keys: list[Key]) -> None:
        size, given = 4 * event.block_size, dict(event.extra_keys)
        assert len(event.tokens) == size * len(keys)
        assert len(event.block_ids) == len(keys) or event.kind == "mamba"  # a checkpoint has several blocks
        assert (event.sequence_id is None) == (event.medium != "GPU")
        assert (event.kind == "sliding_window") == (event.window is not None)
        parent = event.parent_block_hash
        for number, key in enumerate(keys):
            assert key not in self.blocks, "stored twice"
            tokens = event.tokens[number * size : (number + 1) * size]
            self.blocks[key] = parent, tokens, given.get(number, b""), event.salt, event.lora
            parent = key[-1]


def cached(manager: KVCacheManager) -> dict[Key, Content]:
    """Return what is cached, on the device and in all tiers, as `Told.blocks` has it."""
    traffic = manager._transfers  # noqa: SLF001
    found = cached_in(manager._index, "GPU")  # noqa: SLF001
    for tier in [] if traffic is None else traffic.pools:
        assert tier.index.events is not None
        found |= cached_in(tier.index, tier.index.events.medium)
    return found


def cached_in(index: PrefixIndex, medium: str) -> dict[Key, Content]:
    """Return what one map has."""
    attached = index.attached
    layout = None if attached is None else attached.layout
    found: dict[Key, Content] = {}
    for run in index.runs():
        whole = prefix_of(run, len(run.blocks))
        names = [block.block_hash or b"" for block in whole.blocks]
        keys, first, who = whole.extra_keys or {}, len(names) - len(run.blocks), salt_and_lora(whole)
        if layout is None or layout.primary is not None:
            group = None if layout is None else layout.primary
            for number in range(first, len(names)):
                parent = names[number - 1] if number else None
                content = parent, block_tokens(whole, number, index.block_size), keys.get(number, b""), *who
                found[medium, group, names[number]] = content
        if attached is not None and layout is not None:
            for side_group in layout.side_groups:
                for number in range(len(names) * index.block_size // side_group.block_size):
                    position, column = side_group.home(number)
                    if position < first or attached.at(whole.blocks[position], column) is None:
                        continue
                    name, parent = (
                        None if at < 0 else attached.name_in_chain(side_group, whole.blocks, at)
                        for at in (number, number - 1)
                    )
                    same = side_group.block_size == index.block_size
                    own = keys.get(position, b"") if same else b""
                    tokens = block_tokens(whole, number, side_group.block_size)
                    found[medium, side_group.group, name or b""] = parent, tokens, own, *who
            size, alignment = index.block_size, layout.alignment
            for number in {} if attached.checkpoints is None else attached.checkpoints.in_run(run):
                end = (first + number + 1) * size
                before = (end - alignment) // size
                parent = names[before - 1] if before else None
                tokens = bytes(whole.tokens[4 * (end - alignment) : 4 * end])
                found[medium, layout.state, names[first + number]] = parent, tokens, b"", *who
    return found


def block_tokens(prefix: Any, number: int, block_size: int) -> bytes:
    return bytes(prefix.tokens[4 * number * block_size : 4 * (number + 1) * block_size])


def salt_and_lora(prefix: Any) -> tuple[str | None, str | None]:
    return decode_salt_and_lora((prefix.extra_keys or {}).get(0))
