"""Cached and evicted blocks by salt, for people who run a server with tenants."""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items

from kvblocks.core.block import KVCacheBlock, Run
from kvblocks.core.hooks import Watcher
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.hashing.extra_keys import decode_salt_and_lora


def count_by_salt(index: PrefixIndex) -> dict[str | None, int]:
    """Return how many blocks are cached for each salt; None stands for no salt. Changes nothing. O(runs)."""
    found: Counter[str | None] = Counter()
    salts: dict[Run, str | None] = {}
    for run, num_blocks in index.count_by_run():  # parents come before children
        parent = run.key[0]
        salts[run] = _salt_of(run) if parent is None else salts[parent]
        found[salts[run]] += num_blocks
    return dict(found)


class SaltEvictions(Watcher):
    """Counts the evicted blocks of each group of salts, while it watches an index.

    group_of: returns the name of a salt's group. It must have few values, since all are kept. num_evicted: the counts
    by group. Each evicted block costs O(runs above it).
    """

    def __init__(self, group_of: Callable[[str | None], str]) -> None:
        self._group_of = group_of
        self.num_evicted: Counter[str] = Counter()

    def note_taken(self, blocks: Items[KVCacheBlock]) -> None:
        """Count those blocks that are still cached, and so are evicted now."""
        for block in blocks:
            run = block.run
            if run is None:
                continue
            while run.key[0] is not None:
                run = run.key[0]
            self.num_evicted[self._group_of(_salt_of(run))] += 1


def _salt_of(root: Run) -> str | None:
    """The salt of a run that begins a prefix."""
    return decode_salt_and_lora(root.key[3])[0]
