"""`Tiers`, which is `manager.tiers`: what is kept below the device, what moves between, and when.

In each step the engine first carries out the copies (`take_copies`), then runs the step, and then carries out the
transfers. It asks for the transfers (`take_transfers`) after all calls that made room for that step. The order matters:
a store reads what the step wrote, and the step or its copies may read a block that a load writes. Transfers may run in
any order, and take any time: no block and no slot is in two of them, unless both only read it. A sequence that is
loading is in no step until `complete` says what arrived.

`transfers` decides what moves, and when.
"""

from collections.abc import Iterable, Iterator
from typing import Any, SupportsFloat, SupportsIndex, final

from kvblocks.arguments import (
    Flag,
    Given,
    Text,
    asked_once,
    check_count,
    check_flag,
    check_name,
    check_number,
    is_a,
    listed,
    plain_text,
    wrong,
)
from kvblocks.closed import Closed
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.hit import CacheHit, check_start
from kvblocks.core.link import ManagerLink
from kvblocks.core.sequence import Sequence, not_a_sequence
from kvblocks.errors import InvalidArgumentError, SequenceStateError
from kvblocks.retention.quotas import TenantQuotas
from kvblocks.stats import QuotaUsage, TierStats
from kvblocks.tiers.calls import ManagerCalls
from kvblocks.tiers.events import check_digests
from kvblocks.tiers.hit import TierHit
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.pool import TierPool
from kvblocks.tiers.rates import MOST_NUMBER, Rate, num_worth_loading
from kvblocks.tiers.restoring import check_slots, first_digests, known_prefix, note_found, restore_slots
from kvblocks.tiers.transfer import Loaded, Transfer
from kvblocks.tiers.transfers import Transfers


@final
class Tiers(Closed):
    """The tiers of a manager, the fastest first. Iterating yields their `TierStats`. Made by a manager.

    Calls raise as the manager's do; a call that raised has changed nothing. num_stale_answers: how often `complete` was
    called for a transfer that had already ended.
    """

    def __init__(self, link: ManagerLink, transfers: Transfers, calls: ManagerCalls) -> None:
        """transfers: what calls delegate to. calls: what this class needs of the manager."""
        self._link = link
        self._change = link.change
        self._transfers = transfers
        self._calls = calls
        self._compute_rate = Rate()
        self.num_stale_answers = 0

    def __len__(self) -> int:
        return len(self._transfers.pools)

    def __iter__(self) -> Iterator[TierStats]:
        return iter([pool.stats() for pool in self._transfers.pools])

    @property
    def is_busy(self) -> bool:
        """Whether a transfer isn't answered, or `take_transfers` or `take_changes` may return something. O(tiers).

        New blocks for a tier that stores blocks as they are computed don't count: only `take_transfers` looks for
        those.
        """
        return self._transfers.is_busy

    @property
    def num_resets(self) -> int:
        """How often everything in the tiers was forgotten (`reset_prefix_cache`). A shared store keeps its blocks."""
        return self._transfers.num_clears

    # Lookups.

    def find(self, hit: Given[CacheHit]) -> list[TierHit]:
        """Return what the tiers have of a sequence after its hit, in parts, the nearest first. Changes nothing.

        Each part begins where the one before it ends, and `allocate` takes any number of the first parts. Raises
        InvalidArgumentError, and SequenceStateError for another manager's hit. One lookup in each tier.
        """
        self._change.check_whole()
        given: Any = hit
        if not is_a(given, CacheHit):
            raise wrong("tiers.find", "what get_computed_blocks returned", hit)
        own: CacheHit = given
        if own.index is not self._transfers.index:
            raise SequenceStateError(f"tiers.find: expected a hit of this manager's cache, got another's: {own}")
        return self._transfers.find(own)

    def worth_loading(self, loads: Iterable[TierHit]) -> list[TierHit]:
        """Return the first parts of `find`'s answer that are expected to be faster to load than to compute.

        This uses the tiers' bytes per second (see `Tier`, learned by `complete`) and the model's speed (learned by
        `note_computed`). A tier of unknown speed counts as fast, and a model of unknown speed as slow. A load begins
        when those before it in its tier have ended, so their bytes count too. Changes only what is known about a tier:
        if a part is declined while nothing loads from its tier, the tier is assumed to be a little faster than learned.
        Raises InvalidArgumentError, and SequenceStateError for another manager's parts. O(parts).
        """
        given = self._transfers.listed(loads)
        waits_s = [hit.pool.num_loading_bytes * hit.pool.rate.seconds_a_unit for hit in given]
        costs = [(hit.num_tokens, hit.seconds() + wait_s) for hit, wait_s in zip(given, waits_s, strict=True)]
        number = num_worth_loading(costs, self._compute_rate.seconds_a_unit)
        for declined in given[number:]:
            if not declined.pool.num_loading_bytes:  # else a load that is under way will say how fast the tier is
                declined.pool.rate.doubt()  # so that one slow load doesn't rule out the tier forever
        return given[:number]

    def note_computed(self, num_tokens: SupportsIndex, seconds: SupportsFloat) -> None:
        """Learn that a step computed this many tokens of prompts in this many seconds. Raises InvalidArgumentError."""
        number = check_count("num_tokens", num_tokens, 0)
        self._compute_rate.note(number, _check_seconds(seconds))

    def allocate(
        self,
        sequence: Given[Sequence],
        hit: Given[CacheHit] | None,
        loads: Iterable[TierHit],
        num_new_tokens: SupportsIndex | None = 0,
    ) -> list[KVCacheBlock] | None:
        """Start a sequence with a hit and with tokens that tiers have: `allocate_slots` with loads.

        loads: what `find` returned for the hit, or the first items of it. They get slots, and so do the
        `num_new_tokens` known tokens after them (None: all the rest). All of these are delayed. The transfers begin
        with the next `take_transfers`, and until `complete` says that the sequence is loaded, it must not be in any
        step. Without loads this is `allocate_slots`.

        Returns and raises what that call does; StaleHitError also for loads that are no longer stored. O(blocks).
        """
        self._change.check_whole()
        check_start(sequence, hit)
        number = None if num_new_tokens is None else asked_once(num_new_tokens)
        own: Any = sequence
        found: Any = hit
        return self._calls.start(own, found, self._transfers.check_loads(own, found, loads), number)

    # Transfers.

    def take_transfers(self) -> list[Transfer]:
        """Return what is to be copied, loads first. These transfers count as begun: answer each with `complete`.

        Call it once per step, when all steps that were given slots are launched or have ended: see the module. No more
        stores begin than the limit on held blocks allows. O(blocks that move, and of their prefixes), and O(sequences)
        if a tier stores what is computed.
        """
        self._change.begin()
        transfers = self._transfers.take()
        self._link.end()
        return transfers

    @property
    def unanswered(self) -> list[Transfer]:
        """What `take_transfers` has returned and `complete` hasn't been told of, in the order of beginning.

        So nothing is lost if an interrupt comes as `take_transfers` returns. O(these).
        """
        return [*self._transfers.begun]

    def complete(self, transfer: Given[Transfer], ok: Flag, *, seconds: SupportsFloat | None = None) -> list[Loaded]:
        """Report that a transfer is over. ok: whether all of its bytes arrived, are right, and are where they belong.

        A store's blocks are released, and the tier has those that arrived, as soon as it has all blocks before them.
        With the last transfer of a load, its sequences are returned. What arrived is cached, the slots after that are
        released, and the sequences go on from `Loaded.num_tokens`. The tier forgets blocks that a load didn't bring. A
        second answer for a transfer changes nothing but `num_stale_answers`. seconds: how long the transfer took, from
        which `worth_loading` learns.

        Raises InvalidArgumentError. O(blocks).
        """
        self._change.check_whole()
        is_ok = check_flag("ok", ok)
        took = None if seconds is None else _check_seconds(seconds)
        own = self._check_transfer(transfer)
        job = self._transfers.begun.get(own)
        if job is None:
            self.num_stale_answers += 1
            return []
        commits = self._transfers.prepare_commits(job, own, ok=is_ok)
        self._change.begin()
        if own.is_load and not is_ok and took is not None:
            own.pool.rate.note_failed(own.num_bytes, took)
        ended = self._transfers.end(own, job, commits, took, ok=is_ok)
        self._link.end()
        return ended

    def give_up(self, sequence: Given[Sequence]) -> int:
        """Stop waiting for a sequence's loads. Returns how many of its tokens, from the first, it has without them.

        The sequence can go on at once. A transfer that has begun keeps its blocks until it is answered. Raises
        SequenceStateError if the sequence isn't loading. O(blocks).
        """
        self._change.check_whole()
        own = self._link.check_owned(sequence, "tiers.give_up")
        if not self._transfers.is_loading(own):
            raise SequenceStateError(f"tiers.give_up: expected a sequence that is loading, got {own}")
        self._change.begin()
        self._transfers.give_up(own)
        self._link.end()
        return own.num_computed_tokens

    def is_loading(self, sequence: Given[Sequence]) -> bool:
        """Whether a sequence waits for loads. Such a sequence must not be in any step. O(1)."""
        if not is_a(sequence, Sequence):
            raise not_a_sequence("tiers.is_loading", sequence)
        own: Sequence = sequence  # type: ignore[assignment]
        return self._transfers.is_loading(own)

    # Shared tiers.

    def note_found(
        self,
        tier: Text,
        sequence: Given[Sequence],
        num_blocks: SupportsIndex,
        attached: Iterable[tuple[SupportsIndex, SupportsIndex]] = (),
    ) -> int:
        """Report that a shared tier now has the first `num_blocks` full blocks of a sequence, and nothing after them.

        tier: its name. attached: the side groups' blocks that it has, as (index of the primary block that they are
        attached to, column as in `BlockIdentity`), and the parts of checkpoints. A checkpoint counts if all of its
        parts are there.

        From now on `find` counts on the answer, and a load checks it. Slots are taken as for a store, within quotas, so
        the result may be less than `num_blocks`: it is the number of first blocks known to be there. Call this when the
        tier has answered, before `find`. Blocks that `evict_blocks` took back must be deleted from the tier before it
        is asked. Raises InvalidArgumentError. O(tokens).
        """
        self._change.check_whole()
        pool = self._check_tier("note_found", tier)
        if not pool.is_shared:
            raise wrong("tiers.note_found", "the name of a tier that is shared (is_shared=True)", tier)
        if not is_a(sequence, Sequence):
            raise not_a_sequence("tiers.note_found", sequence)
        own: Sequence = sequence  # type: ignore[assignment]
        prefix = known_prefix(own, pool.index.block_size)
        most = len(prefix.tokens) // (4 * pool.index.block_size)
        number = check_count("num_blocks", num_blocks, 0, most)
        columns = _check_attached(attached, number)
        names = first_digests(pool, prefix, number)
        self._change.begin()
        found = note_found(pool, prefix, number, columns, names)
        self._link.end()
        return found

    # Persistent tiers.

    def take_changes(self) -> dict[str, dict[int, BlockIdentity | None]]:
        """Return what became of the slots of persistent tiers since the last call, by tier, and forget it.

        For each slot this is the block that it holds from now on, or None if it holds nothing that lookups can find.
        The latest store comes last. Remember either all changes of a call or none of them; `restore` takes what was
        remembered. At most one change per slot is kept for the next call. O(tiers).
        """
        self._change.begin()
        noted = {pool.name: pool.changes for pool in self._transfers.pools}
        changes = {name: of_tier.take() for name, of_tier in noted.items() if of_tier is not None}
        self._link.end()
        return changes

    def take_uses(self) -> dict[str, list[int]]:
        """Return, by tier, where the prefixes that were used since the last call end in persistent tiers: the last slot
        of each.

        The one used last comes last. Move these slots after all others that are remembered, in this order, so that
        `restore` knows which prefixes were used last. Slots for which `take_changes` has a change are left out. At most
        one use per slot is kept for the next call. O(tiers + such slots).
        """
        self._change.begin()
        uses = {pool.name: pool.changes.take_used() for pool in self._transfers.pools if pool.changes is not None}
        self._link.end()
        return uses

    def empty_slots(self, tier: Text) -> list[int]:
        """Return the slots of a persistent tier that hold nothing that lookups can find, and that no transfer uses.

        Their bytes may still be there, so erase these slots to delete data. Raises InvalidArgumentError. O(slots).
        """
        self._change.check_whole()
        return self._check_tier("empty_slots", tier, persistent=True).empty_slots()

    def restore(self, tier: Text, slots: Iterable[tuple[SupportsIndex, BlockIdentity]]) -> int:
        """Take a persistent tier's slots back as they were remembered.

        tier: its name; it must be empty, as in a new manager. slots: ids, and the block that each holds, the least
        recently stored or used (`take_uses`) first. A slot can't be found if its prefix isn't among them, or its keys
        can't be read; it counts as forgotten (`take_changes`). The bytes are checked when they are loaded.

        Returns how many can be found. Raises InvalidArgumentError, and SequenceStateError if the tier isn't empty.
        O(slots log slots).
        """
        self._change.check_whole()
        pool = self._check_tier("restore", tier, persistent=True)
        remembered = check_slots(pool, slots)
        if pool.pool.num_cached_blocks or pool.pool.num_free_blocks < len(pool.pool.blocks):
            raise SequenceStateError(f"tiers.restore: expected tier {pool.name!r} to be empty, got {pool.stats()}")
        check_digests(pool, remembered[1])
        self._change.begin()
        number = restore_slots(pool, remembered)
        self._transfers.note_restored(pool)
        self._link.end()
        return number

    # Quotas.

    def set_quota(self, tier: Text, salt: Text | None, max_blocks: SupportsIndex | None) -> None:
        """Limit how many blocks of one salt a tier keeps stored while others want its slots.

        Like `manager.quotas.set`, which limits the device's blocks, but blocks count once their bytes have arrived.
        tier: its name. salt: None stands for blocks without a salt. Raises InvalidArgumentError. O(slots of the tier).
        """
        pool = self._check_tier("set_quota", tier)
        name = check_name("salt", salt)
        number = None if max_blocks is None else check_count("max_blocks", max_blocks, 0)
        quotas = TenantQuotas() if pool.quotas is None else pool.quotas
        self._change.begin()
        quotas.set_quota(name, number)
        pool.charge(quotas)
        self._link.end()

    def set_default_quota(self, tier: Text, max_blocks: SupportsIndex | None) -> None:
        """`set_quota` for every salt that has none of its own in this tier, except None (no salt). O(slots)."""
        pool = self._check_tier("set_default_quota", tier)
        number = None if max_blocks is None else check_count("max_blocks", max_blocks, 0)
        quotas = TenantQuotas() if pool.quotas is None else pool.quotas
        self._change.begin()
        quotas.set_default(number)
        pool.charge(quotas)
        self._link.end()

    def quota_of(self, tier: Text, salt: Text | None) -> int | None:
        """Return the quota of a salt in a tier, its own or the default; None if it has none.

        Raises InvalidArgumentError. O(1).
        """
        quotas, name = self._check_tier("quota_of", tier).quotas, check_name("salt", salt)
        return None if quotas is None else quotas.limit_of(name)

    def quotas(self, tier: Text) -> list[QuotaUsage]:
        """Return a tier's quotas and their use, for salts that have a quota or store anything there.

        Raises InvalidArgumentError. O(salts).
        """
        quotas = self._check_tier("quotas", tier).quotas
        return [] if quotas is None else quotas.usage()

    def _check_tier(self, call: str, tier: Text, *, persistent: bool = False) -> TierPool:
        given: Any = tier
        name = plain_text(given) if is_a(given, str) else None
        pools = {pool.name: pool for pool in self._transfers.pools if not persistent or pool.changes is not None}
        if name not in pools:
            kind = "persistent tier" if persistent else "tier"
            raise wrong(f"tiers.{call}", f"the name of a {kind}, one of {list(pools)}", tier)
        return pools[name]

    def _check_transfer(self, transfer: object) -> Transfer:
        given: Any = transfer
        if not is_a(given, Transfer):
            raise wrong("tiers.complete", "what take_transfers returned", transfer)
        own: Transfer = given
        if own.pool not in self._transfers.pools:
            raise InvalidArgumentError(f"tiers.complete: expected a transfer of this manager's tiers, got {own}")
        return own


def _check_attached(attached: object, num_blocks: int) -> list[tuple[int, int]]:
    expected = "pairs of a block's index and a column"
    checked: list[tuple[int, int]] = []
    for given in listed("attached", expected, attached):
        pair: Any = given
        if not is_a(pair, tuple) or len(pair) != 2:
            raise wrong("attached", expected, pair)
        index = check_count("attached: index", pair[0], 0, max(0, num_blocks - 1))
        checked.append((index, check_count("attached: column", pair[1], 1)))
    return checked


def _check_seconds(seconds: SupportsFloat) -> float:
    number = check_number("seconds", seconds, "a number of seconds, at least 0")
    if not 0 <= number < MOST_NUMBER:
        raise wrong("seconds", "a number of seconds, at least 0", seconds)
    return float(number)
