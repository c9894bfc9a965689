"""Why a prefix missed: `manager.inspect.explain`, for people who want to know why their hit rate is low.

This explains the first block that isn't found. It looks for the block in the removal history first. If the block isn't
there, it searches the cache for similar blocks: the same tokens under other keys, or the same first tokens.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from kvblocks.arguments import counted, shown
from kvblocks.core.block import ROOT, KVCacheBlock, Node, Run
from kvblocks.core.caching import find_blocks
from kvblocks.core.hooks import RemovalCause
from kvblocks.core.longest_hit import HitLimit, find_limit
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence
from kvblocks.core.slots import SlotAllocator
from kvblocks.core.tokens import num_equal
from kvblocks.hashing.extra_keys import ExtraKey, decode_extra_keys
from kvblocks.observe.removal_history import Removal, RemovalHistory
from kvblocks.stats import TierPart

MissCause = Literal[
    "no miss", "never cached", "evicted", "aborted", "reset", "dropped", "other keys", "partly equal", "group", "state"
]


@dataclass(frozen=True, slots=True)
class LostBlock:
    """The first block of a prompt that neither the device nor a tier has, although tiers have some blocks before it.

    block: its index. removal: its last one. num_blocks_since: how many blocks were taken from the pool since then.
    """

    block: int
    removal: Removal
    num_blocks_since: int

    def __str__(self) -> str:
        return f"block {self.block} is in no tier: it {_how(self.removal)} {_since(self.num_blocks_since)}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the longest cached prefix of a sequence ends after `num_cached_blocks` of its `num_full_blocks`.

    cause says why the next block isn't found:

    - "no miss": there is no next block; all full blocks are cached.
    - "evicted", "aborted", "reset", "dropped": it was cached, and removed. `removal` is the last removal, which may be
      one from a tier. Since then `num_blocks_since` blocks were taken from the pool.
    - "other keys": it is cached under `their_keys` instead of `our_keys` (salt, LoRA, keys by position, as
      `decode_extra_keys` returns them). The keys differ first at block `keys_block`.
    - "partly equal": the block cached there has only its first `num_common_tokens` tokens in common.
    - "never cached": no similar block is cached, or it was removed longer ago than the history remembers.
    - "group": the primary group has `num_matched_blocks` blocks, but `group` lacks the tokens `missing_tokens` (first,
      end) that a longer hit needs. `kind` says how its layers attend, as `Group.label`. `removal` says why; None if
      that isn't known.
    - "state": the primary group has `num_matched_blocks` blocks, but `group`, whose layers keep a state, has no
      checkpoint after the tokens `missing_tokens`. `removal` is that of the last checkpoint there that is remembered.

    All block numbers are those of the primary group. Other attributes:

    - group: the group that limits the hit; None if there is only one.
    - tiers: which tokens after the hit are in tiers, in order.
    - behind_tiers: the block after these, if it is known to have been removed.
    - has_state: whether a group keeps a state.
    """

    cause: MissCause
    num_cached_blocks: int
    num_full_blocks: int
    removal: Removal | None = None
    num_blocks_since: int = 0
    num_common_tokens: int = 0
    keys_block: int = 0
    our_keys: tuple[ExtraKey, ...] = ()
    their_keys: tuple[ExtraKey, ...] = ()
    group: int | None = None
    kind: str | None = None
    num_matched_blocks: int = 0
    missing_tokens: tuple[int, int] | None = None
    tiers: tuple[TierPart, ...] = ()
    has_state: bool = False
    behind_tiers: LostBlock | None = None

    def __str__(self) -> str:
        behind = [] if self.behind_tiers is None else [str(self.behind_tiers)]
        return "; ".join([self._miss(), *map(str, self.tiers), *behind])

    def _miss(self) -> str:
        found = f"{self.num_cached_blocks} of {self.num_full_blocks} full blocks are cached"
        if self.missing_tokens is None and self.num_matched_blocks > self.num_cached_blocks:
            found = (
                f"{self.num_matched_blocks} of {self.num_full_blocks} full blocks are cached, {self.num_cached_blocks}"
            )
            found += " of them can be hit: hits end where the largest blocks end"
            found += ", and before the last token where layers keep a state" if self.has_state else ""
        if self.cause == "no miss":
            return found
        if self.missing_tokens is not None and self.cause == "state":
            return self._state_miss(*self.missing_tokens)
        if self.missing_tokens is not None:
            return f"{found} in all groups; {self._group_miss(*self.missing_tokens)}"
        missed = f"{found}; block {max(self.num_cached_blocks, self.num_matched_blocks)} "
        if self.removal is not None and self.cause in get_args(RemovalCause):
            return f"{missed}{_how(self.removal)} {_since(self.num_blocks_since)}"
        if self.cause == "other keys":
            theirs, ours = list(self.their_keys) or "no keys", list(self.our_keys) or "no keys"
            return f"{missed}is cached with other keys: block {self.keys_block} has {theirs} there and {ours} here"
        if self.cause == "partly equal":
            common = counted(self.num_common_tokens, "token")
            return f"{missed}has only {common} at its beginning in common with what is cached there"
        return f"{missed}was never cached, as far as is remembered"

    def _group_miss(self, first: int, end: int) -> str:
        lacks = f"{self.num_matched_blocks} are in the primary one, but group {self.group} ({self.kind}) lacks"
        how = "as far as is remembered they were never cached"
        if self.removal is not None:
            how = f"they were {self.removal.cause}{_where(self.removal)} {_since(self.num_blocks_since)}"
        return f"{lacks} tokens {first} to {end - 1}; {how}"

    def _state_miss(self, first: int, end: int) -> str:
        lacks = f"{end} tokens of KV are cached, but group {self.group} ({self.kind}) has no checkpoint after"
        lacks += f" token {first}, where the hit ends" if first else " any of them"
        if self.removal is None:
            return f"{lacks}; as far as is remembered none was saved there"
        return f"{lacks}; one was {self.removal.cause}{_where(self.removal)} {_since(self.num_blocks_since)}"


def _how(removal: Removal) -> str:
    """What became of a block."""
    by = "" if removal.sequence_id is None else f" for sequence {shown(removal.sequence_id)}"
    how = {
        "evicted": f"was evicted{_where(removal)}{by}",
        "aborted": "was never computed: its step was aborted",
        "reset": "was removed by a reset of the cache",
        "dropped": "was removed from the cache on request",
    }
    return how[removal.cause]


def _where(removal: Removal) -> str:
    return f" from {removal.tier!r}" if removal.tier is not None and removal.cause == "evicted" else ""


def _since(num_blocks: int) -> str:
    return f"({counted(num_blocks, 'block')} taken from the pool since)"


def explain(
    index: PrefixIndex,
    slots: SlotAllocator,
    history: RemovalHistory | None,
    sequence: Sequence,
    tiers: tuple[TierPart, ...] = (),
) -> Explanation:
    """Return why the hit of a sequence ends where it does and, with several groups, which of them limits it.

    history: None: nothing is remembered. tiers: what tiers have after the hit. Changes nothing, except that runs keep
    computed digests. O(runs + tokens + blocks cached for these tokens under any keys).
    """
    explanation = _explain_hit(index, slots, history, sequence)
    if not tiers:
        return explanation
    behind = None if history is None else _behind(index, history, sequence, tiers[-1].end_token // index.block_size)
    return replace(explanation, tiers=tiers, behind_tiers=behind)


def _behind(index: PrefixIndex, history: RemovalHistory, sequence: Sequence, block: int) -> LostBlock | None:
    """Return what is known about the first block that neither device nor tiers have. O(tokens that tiers have).

    None if tiers have all. They aren't asked for the block of the last token, which is computed again.
    """
    if block >= (sequence.num_tokens - 1) // index.block_size:
        return None
    blocks = find_blocks(index, sequence)
    node, keys = blocks[-1].node if blocks else ROOT, sequence.encoded_keys(index.block_size) or {}
    digests = index.digests(node, sequence.packed_tokens(), keys, min(len(blocks), block), block + 1)
    removal = history.find(bytes(digests[-index.epoch.num_digest_bytes :]))
    return None if removal is None else LostBlock(block, removal, history.num_taken_blocks - removal.num_taken_blocks)


def explain_miss(index: PrefixIndex, history: RemovalHistory | None, sequence: Sequence) -> Explanation:
    """Return an explanation for a `PrefixCache`, which has no groups and no tiers."""
    now = 0 if history is None else history.num_taken_blocks
    return _explain_miss(index, history, sequence, find_blocks(index, sequence), now)


def _explain_hit(
    index: PrefixIndex, slots: SlotAllocator, history: RemovalHistory | None, sequence: Sequence
) -> Explanation:
    matched, now = find_blocks(index, sequence), slots.num_taken_blocks
    attached = index.attached
    if attached is None:
        return _explain_miss(index, history, sequence, matched, now)
    end, limit = find_limit(index, matched, sequence.num_tokens)
    num_hit = end // index.block_size
    if limit is not None:
        found = [None if history is None else history.find(key) for key in limit.removal_keys]
        removal = next((one for one in found if one is not None), None)
        num_full = sequence.num_tokens // index.block_size
        return replace(_group_limit(limit, num_hit, num_full, removal, now), num_matched_blocks=len(matched))
    explanation = _explain_miss(index, history, sequence, matched, now)
    return replace(
        explanation,
        group=slots.primary_group,
        num_cached_blocks=num_hit,
        num_matched_blocks=len(matched),
        has_state=attached.checkpoints is not None,
    )


def _group_limit(limit: HitLimit, num_hit: int, num_full: int, removal: Removal | None, now: int) -> Explanation:
    return Explanation(
        "state" if limit.is_state else "group",
        num_hit,
        num_full,
        removal,
        0 if removal is None else now - removal.num_taken_blocks,
        group=limit.group,
        kind=limit.kind,
        missing_tokens=(limit.first_token, limit.end_token),
    )


def _explain_miss(
    index: PrefixIndex, history: RemovalHistory | None, sequence: Sequence, blocks: list[KVCacheBlock], now: int
) -> Explanation:
    """Return why the first block after `blocks`, the sequence's cached ones, isn't cached. now: in blocks taken."""
    size = index.block_size
    num_cached, num_full = len(blocks), sequence.num_tokens // size
    if num_cached == num_full:
        return Explanation("no miss", num_cached, num_full)
    node = blocks[-1].node if blocks else ROOT
    tokens, keys = sequence.packed_tokens(), sequence.encoded_keys(size) or {}
    if history is not None:
        removal = history.find(bytes(index.digests(node, tokens, keys, num_cached, num_cached + 1)))
        if removal is not None:
            return Explanation(removal.cause, num_cached, num_full, removal, now - removal.num_taken_blocks)
    roots = [run for run in index.runs() if run.key[0] is None]
    chain = _longest_by_tokens(roots, tokens)
    if len(chain) > num_cached:
        block = next((i for i, theirs in enumerate(chain) if theirs != keys.get(i)), 0)
        our_keys, their_keys = decode_extra_keys(keys.get(block) or b""), decode_extra_keys(chain[block] or b"")
        return Explanation(
            "other keys",
            num_cached,
            num_full,
            keys_block=block,
            our_keys=tuple(our_keys),
            their_keys=tuple(their_keys),
        )
    missed = bytes(tokens[num_cached * 4 * size : (num_cached + 1) * 4 * size])
    num_common = _num_common_tokens(node, roots, missed, keys.get(num_cached))
    if num_common:
        return Explanation("partly equal", num_cached, num_full, num_common_tokens=num_common)
    return Explanation("never cached", num_cached, num_full)


def _longest_by_tokens(roots: list[Run], tokens: memoryview) -> list[bytes | None]:
    """Return the keys, by block, of the cached prefix with the most blocks in common with `tokens`, under any keys."""
    longest, end_of_longest = 0, ROOT
    pending: list[tuple[Run, int]] = [(root, 0) for root in roots]  # runs, and how many blocks are above them
    while pending:
        run, first = pending.pop()
        start = first * run.epoch.block_bytes
        count = num_equal(run.tokens, tokens[start : start + len(run.blocks) * run.epoch.block_bytes])
        count = min(count // run.epoch.block_bytes, len(run.blocks))
        if first + count > longest:
            longest, end_of_longest = first + count, (run, count - 1)
        for position, children in (run.children or {}).items():
            if position < count:
                pending += [(child, first + position + 1) for child in children]
    return _keys_above(end_of_longest)


def _keys_above(node: Node) -> list[bytes | None]:
    """Return the keys, by block, of the prefix that ends in a node."""
    keys: list[bytes | None] = []  # last block first
    above, position = node
    while above is not None:
        keys += [(above.extra_keys or {}).get(index) for index in range(position, -1, -1)]
        above, position, _, _ = above.key
    return keys[::-1]


def _num_common_tokens(node: Node, roots: list[Run], tokens: bytes, key: bytes | None) -> int:
    """Return how many leading tokens `tokens` and the most similar block below `node` with this key have in common."""
    run, position = node
    children = roots if run is None else list((run.children or {}).get(position, {}))
    below = [bytes(child.tokens[: len(tokens)]) for child in children if child.key[3] == key]
    if run is not None and position + 1 < len(run.blocks) and (run.extra_keys or {}).get(position + 1) == key:
        below.append(bytes(run.tokens[(position + 1) * len(tokens) : (position + 2) * len(tokens)]))
    return max([num_equal(tokens, other) // 4 for other in below], default=0)
