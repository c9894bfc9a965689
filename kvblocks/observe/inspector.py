"""`Inspector`, which is `manager.inspect`: for people, routers and tests. No step of an engine needs it."""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple, SupportsIndex, final

from kvblocks.arguments import Given, check_count, listed, wrong
from kvblocks.closed import Closed
from kvblocks.core.block import KVCacheBlock, Run
from kvblocks.core.hooks import Watcher
from kvblocks.core.link import ManagerLink
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence, as_sequence
from kvblocks.hashing.extra_keys import decode_salt_and_lora
from kvblocks.observe.digests import block_digests, find_by_digest
from kvblocks.observe.explanation import Explanation, explain
from kvblocks.observe.picture import PrefixRow, prefix_rows, to_dot
from kvblocks.observe.removal_history import RemovalHistory
from kvblocks.observe.shared_prefixes import SharedPrefix, find_shared_prefixes
from kvblocks.stats import GroupUsage, TierPart


class HeldBlocks(NamedTuple):
    """A sequence that holds blocks: one item of `Inspector.leaks`.

    num_blocks: how many blocks it holds in all groups, including shared ones. age: how many sequences have begun, by
    `allocate_slots` or `fork`, since this one did.
    """

    sequence: Sequence
    num_blocks: int
    age: int


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


@final
class Inspector(Closed):
    """What a manager holds and why, for people, routers and tests: `manager.inspect`.

    Made by a manager. Its calls change nothing, except that `watch_evictions` begins to count.
    """

    def __init__(
        self,
        link: ManagerLink,
        history: RemovalHistory | None,
        find_below: Callable[[Sequence], tuple[TierPart, ...]],
    ) -> None:
        """find_below: asks the tiers what they have after a sequence's hit."""
        self._link = link
        self._change = link.change
        self._slots = link.slots
        self._index = link.slots.pool.index
        self._sequences = link.sequences
        self._history = history
        self._find_below = find_below

    def explain(self, sequence: Given[Sequence]) -> Explanation:
        """Explain why the longest cached prefix of a sequence ends where it does.

        Evictions, aborts and resets are known only with num_history_blocks. With several groups the result names the
        one that ended the hit, and with tiers it says what they have after the hit. Raises InvalidArgumentError. For
        people, since it costs O(runs in the cache + tokens + blocks cached for them under any keys), and O(slots) for
        tiers that have some of the tokens.
        """
        self._change.check_whole()
        own = as_sequence("inspect.explain", sequence)
        return explain(self._index, self._slots, self._history, own, self._find_below(own))

    def shared_prefixes(
        self,
        sequences: Items[Sequence],
        *,
        min_blocks: SupportsIndex = 1,
        num_visible_tokens: Items[SupportsIndex] | None = None,
    ) -> list[SharedPrefix]:
        """Return which of `sequences`, a batch, share blocks, for cascade attention; parents before children.

        See `find_shared_prefixes`. With several groups of layers it looks at the primary group's blocks. Raises
        SequenceStateError (not this manager's sequence) and InvalidArgumentError. Near-linear in the batch's blocks.
        """
        self._change.check_whole()
        batch = listed("sequences", "an iterable of sequences", sequences)
        self._link.check_has_primary("inspect.shared_prefixes")
        for sequence in batch:
            self._link.check_owned(sequence, "inspect.shared_prefixes")
        return find_shared_prefixes(batch, self._index.block_size, min_blocks, num_visible_tokens)

    def prefix_rows(self) -> list[PrefixRow]:
        """Return the cached prefixes as rows of a table, for people. O(cached blocks)."""
        self._change.check_whole()
        self._link.check_has_primary("inspect.prefix_rows")
        pins = self._slots.soft_holds
        pinned = {block for table in pins.tables() for block in table} if pins is not None else set()
        return prefix_rows(self._index, self._slots.pool.queue, pinned)

    def to_dot(self, *, max_nodes: SupportsIndex | None = 200) -> str:
        """Return the cached prefixes as a Graphviz document with a node for each row of `prefix_rows`. For people.

        max_nodes: draw at most this many rows, at least 1; None: draw all. There is also a node for the whole cache,
        and one that says what was left out. Raises InvalidArgumentError. O(cached blocks).
        """
        return to_dot(self.prefix_rows(), max_nodes)

    def block_hashes(self, sequence: Given[Sequence]) -> list[bytes]:
        """Return the digests of a sequence's full blocks of known tokens, allocated or not, cached or not.

        They are the names that `block.block_hash` and events use, for a router or a store. Raises InvalidArgumentError,
        and whatever the hash function raises. O(tokens).
        """
        self._change.check_whole()
        return block_digests(self._index, as_sequence("inspect.block_hashes", sequence))

    def find_block(self, digest: Given[bytes]) -> KVCacheBlock | None:
        """Return the cached block with this digest, as `block_hashes` and events give it; None if there is none.

        Among duplicates it is the one that hits get. Raises InvalidArgumentError. For people and tools: digests decide
        no hit, so there is no map of them, and the call costs O(cached blocks), the first time O(cached tokens).
        """
        self._change.check_whole()
        return find_by_digest(self._index, digest)

    def leaks(self, min_age: SupportsIndex = 0) -> list[HeldBlocks]:
        """Return the sequences that hold blocks and are at least `min_age` old, oldest first, to find those never
        freed.

        In an idle engine each of them is a leak. In a busy one, a sequence that is older than the longest request can
        be is a leak. `pins` and `holds` of the manager own blocks too. Raises InvalidArgumentError. O(blocks of
        sequences).
        """
        self._change.check_whole()
        least = check_count("min_age", min_age, 0)
        newest = self._link.num_started
        return [
            HeldBlocks(sequence, len(set(self._blocks_of(sequence))), newest - sequence.start_number)
            for sequence in self._sequences.values()
            if newest - sequence.start_number >= least
        ]

    def group_usage(self) -> list[GroupUsage]:
        """Return how much of the pool each group uses, in the order of the groups. For people and metrics. O(pool)."""
        self._change.check_whole()
        num_cached = self._slots.pool.index.num_cached_by_group()
        held: list[set[int]] = [set() for _ in num_cached]
        for sequence in self._sequences.values():
            for group, blocks in enumerate(held):
                blocks |= {block.block_id for block in sequence.group_blocks(group) if block is not None}
        return [
            GroupUsage(group, len(blocks), number)
            for group, (blocks, number) in enumerate(zip(held, num_cached, strict=True))
        ]

    def count_by_salt(self) -> dict[str | None, int]:
        """Return how many blocks are cached for each salt; None stands for prompts without one. For people. O(runs)."""
        self._change.check_whole()
        return count_by_salt(self._index)

    def watch_evictions(self, group_of: Callable[[str | None], str]) -> SaltEvictions:
        """Count evicted blocks by groups of salts from now on. Each evicted block then costs O(runs above it).

        group_of: returns the name of a salt's group, and must not raise. All names are kept, so there should be few.
        Raises InvalidArgumentError.
        """
        self._change.check_whole()
        if not callable(group_of):
            raise wrong("group_of", "a function", group_of)
        watcher = SaltEvictions(group_of)
        self._index.watch(watcher)
        return watcher

    def count_empty_blocks(self, max_blocks: SupportsIndex) -> int:
        """Return how many of the next `max_blocks` blocks to be taken hold nothing, so that taking them evicts nothing.

        Raises InvalidArgumentError. O(max_blocks).
        """
        self._change.check_whole()
        most, number = check_count("max_blocks", max_blocks, 0), 0
        for block in self._slots.pool.queue:
            if number == most or block.is_cached:
                break
            number += 1
        return number

    def free_block_ids(self) -> list[int]:
        """Return the ids of the free blocks, in the order in which they will be taken. For tests and tools. O(free
        blocks).

        With an eviction policy, only the blocks that hold nothing are sure to be taken in this order. The others are in
        the order in which they became free.
        """
        self._change.check_whole()
        return self._slots.pool.free_block_ids()

    def _blocks_of(self, sequence: Sequence) -> list[KVCacheBlock]:
        tables = [sequence.group_blocks(group) for group in range(self._slots.num_groups)]
        return [block for table in tables for block in table if block is not None]
