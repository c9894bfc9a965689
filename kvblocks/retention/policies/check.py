"""`check_policy`: whether an eviction policy keeps to the interface. It needs no manager, and no test framework.

`PlainCache` is as plain a cache as possible: dicts and lists instead of runs and queues. It follows docs/policies.md
alone, independently of `Eviction`. Its requests are random, and determined by a seed. The project's tests also compare
each policy in a manager with a model of it, block by block.
"""

import random
from collections import Counter
from collections.abc import Hashable
from operator import index
from typing import Any, NoReturn, SupportsIndex

from kvblocks.arguments import check_count, shown, wrong
from kvblocks.retention.policies.policy import FreeBlock, PolicyFactory

_CALLS = ("free", "use", "remove", "victim")
_MORE_CALLS = ("begin", "pause", "end")  # a policy may have these

_TENANT = "tenant"  # the one that is sometimes over its quota
_TENANTS = (None, None, _TENANT)
_SESSIONS = (None, "a", "b", "c")

Prefix = tuple[str | None, tuple[int, ...]]
"""A tenant, and what the blocks from the first on hold."""


def check_policy(
    make: PolicyFactory, num_blocks: SupportsIndex = 12, num_steps: SupportsIndex = 2000, seed: SupportsIndex = 0
) -> None:
    """Run random requests on a cache whose blocks a policy evicts; raise AssertionError when it breaks a promise.

    The policy must not raise, and must name only blocks that it knows: those of its calls of `free` that no call of
    `use` or `remove` has named since. In a manager each such failure would count in `stats.num_eviction_failures`. The
    message says what was expected, what the policy did, and at which step of which seed. The same arguments give the
    same history if the policy's answers depend only on what it is told.

    make: the policy's class, or a function that makes one; it is called for a tenant's own policy, too. num_blocks: of
    the cache, at least 2. num_steps: how much happens; 2000 steps evict some thousand blocks of the default cache and
    take less than a second. Raises InvalidArgumentError. O(num_steps * num_blocks ** 2).
    """
    if not callable(make):
        raise wrong("make", "a policy's class, or a function that makes a policy", make)
    cache = PlainCache(make, check_count("num_blocks", num_blocks, 2), check_count("seed", seed, 0))
    cache.walk(check_count("num_steps", num_steps, 1))


class Watched:
    """A policy, and the `CacheView` that it is given. known: the free blocks that it was told of, by their ids."""

    def __init__(self, make: PolicyFactory, cache: "PlainCache", num_blocks: int) -> None:
        self.known: dict[int, FreeBlock] = {}
        self.num_blocks = num_blocks
        self._cache = cache
        self._left: dict[int, str] = {}  # by id: the call that last said that a block is known no more
        try:
            self._policy: Any = make(self)
        except Exception as error:  # noqa: BLE001  # whatever a policy raises
            self._fail("making the policy", "no exception", repr(error), error)
        calls = [getattr(self._policy, name, None) for name in _CALLS]
        more = [getattr(self._policy, name, None) for name in _MORE_CALLS]
        if not all(map(callable, calls)) or not all(call is None or callable(call) for call in more):
            names = f"{', '.join(_CALLS)}, and perhaps {', '.join(_MORE_CALLS)}"
            self._fail("making the policy", f"an object with the methods {names}", shown(self._policy))

    @property
    def now(self) -> float:
        """As `CacheView.now`."""
        return self._cache.now

    def digest(self, block_id: int) -> bytes | None:
        """As `CacheView.digest`."""
        prefix = self._cache.prefixes.get(block_id) if block_id in self.known else None
        return None if prefix is None else repr(prefix).encode()

    def free(self, records: list[FreeBlock]) -> None:
        """Tell the policy of blocks that became free."""
        self.known.update({record.block_id: record for record in records})
        self.tell("free", records)

    def leave(self, call: str, block_ids: list[int]) -> None:
        """Tell the policy, by `use` or `remove`, of those of these blocks that it knows."""
        theirs = [block_id for block_id in block_ids if block_id in self.known]
        if theirs:
            self.tell(call, theirs)
        for block_id in theirs:
            del self.known[block_id]
            self._left[block_id] = f"which left by {call}() in step {self._cache.step}"

    def tell(self, call: str, *told: Any) -> Any:
        """Call the policy, if it has this method. Returns what it returns."""
        method = getattr(self._policy, call, None)
        if method is None:
            return None
        try:
            return method(*[[*each] if isinstance(each, list) else each for each in told])
        except Exception as error:  # noqa: BLE001
            self._fail(f"{call}({', '.join(map(shown, told))})", "no exception", repr(error), error)

    def victim(self, num_blocks: int) -> int | None:
        """Ask the policy for a block; None: it names none."""
        answer = self.tell("victim", num_blocks)
        if answer is None:
            return None
        expected = f"None or the id of a block that it knows, one of {sorted(self.known)}"
        try:
            block_id = index(answer)
        except Exception as error:  # noqa: BLE001
            self._fail(f"victim({num_blocks})", expected, shown(answer), error)
        if block_id not in self.known:
            why = self._left.get(block_id, "of which it was never told")
            self._fail(f"victim({num_blocks})", expected, f"{block_id}, {why}")
        return block_id

    def _fail(self, call: str, expected: str, got: str, cause: Exception | None = None) -> NoReturn:
        where = f"check_policy: seed {self._cache.seed}, step {self._cache.step}"
        raise AssertionError(f"{where}: {call}: expected {expected}; got {got}") from cause


class PlainCache:
    """Blocks, requests that own some, and the policies that choose among those that are free and cached.

    A block is cached as soon as a request owns it.
    """

    def __init__(self, make: PolicyFactory, num_blocks: int, seed: int) -> None:
        self.seed, self.step, self.now = seed, 0, 0.0
        self.num_blocks = num_blocks
        self.prefixes: dict[int, Prefix] = {}
        """What cached blocks hold."""
        self.holders: dict[Prefix, list[int]] = {}
        """The blocks of each cached prefix. Hits get the first one; the others are duplicates."""
        self.queue: list[int] = []
        """Free cached blocks, the least recently used first."""
        self.empty = [*range(num_blocks)]
        """Blocks that hold nothing."""
        self.running: list[tuple[Hashable, str | None, list[int]]] = []
        """Sessions, tenants and blocks of requests, and of pins, for which the session is False."""
        self._num_owners: Counter[int] = Counter()
        self._num_hits: Counter[int] = Counter()
        self._givers: dict[int, list[Hashable]] = {}
        self._random = random.Random(seed)
        self._make = make
        self.main = Watched(make, self, num_blocks)
        """The pool's policy."""
        self.own: Watched | None = None
        """That of a tenant that is over its quota."""

    def walk(self, num_steps: int) -> None:
        """Do this many random things."""
        often, seldom = [self._start, self._end], [self._pin, self._forget, self._pause, self._end_session]
        things = [*often * 30, *seldom * 5, self._change_quota, self._reset]
        for _ in range(num_steps):
            self.step += 1
            self.now += self._random.choice([0, 1, 1, 7, -2])  # it need not advance regularly
            self._random.choice(things)()

    # What happens.

    def _start(self) -> None:
        """A request hits what is cached of its prompt, and gets blocks for the rest."""
        session, tenant = self._random.choice(_SESSIONS), self._random.choice(_TENANTS)
        prompt = tuple(self._random.randrange(2) for _ in range(self._random.randint(1, self.num_blocks // 2)))
        hit = self._find((tenant, prompt)) if self._random.random() < 0.9 else []  # none: computed beside another
        num_new = len(prompt) - len(hit)
        if num_new > len(self.empty) + len(self.queue) - sum(not self._num_owners[block] for block in hit):
            return
        if session is not None:
            self._tell("begin", session, tenant)
        self._hold(hit)
        self._num_hits.update(hit)
        new: list[int] = []
        while len(new) < num_new:
            if not self.empty:
                self._evict(num_new - len(new))
            new.append(self.empty.pop())
        self._num_owners.update(new)
        if all(block in self.prefixes for block in hit):  # else what comes after the hit isn't cached either
            for number, block in enumerate(new, len(hit) + 1):
                self.prefixes[block] = tenant, prompt[:number]
                self.holders.setdefault(self.prefixes[block], []).append(block)
        self.running.append((session, tenant, [*hit, *new]))

    def _end(self) -> None:
        """A request ends, or a pin does. Its blocks become free, the end of its prefix first."""
        if not self.running:
            return
        session, _, blocks = self.running.pop(self._random.randrange(len(self.running)))
        freed: list[int] = []
        for block in reversed(blocks):
            self._num_owners[block] -= 1
            prefix = self.prefixes.get(block)
            if session is not False and prefix is not None:
                others = [other for other in self._givers.get(block, []) if other != session]
                self._givers[block] = [*others[-7:], session]
            if self._num_owners[block]:
                continue
            if prefix is None:
                self.empty.append(block)
                continue
            first = self.holders[prefix][0]
            if first != block:  # a duplicate goes, and the first holder is used in its place
                self._uncache(block)
                self.empty.append(block)
                if first not in self.queue:
                    continue
                self.queue.remove(first)
                self._leave("use", [first])
            freed.append(first)
        self._free(freed)

    def _pin(self) -> None:
        """A pin or a transfer holds a free prefix for a while. That is no hit, and no session releases it."""
        if self.queue:
            tenant, held = self.prefixes[self._random.choice(self.queue)]
            blocks = self._find((tenant, held))
            self._hold(blocks)
            self.running.append((False, tenant, blocks))

    def _forget(self) -> None:
        """What a block holds turns out to be bad, or was never written."""
        if self.prefixes:
            self._remove([self._random.choice(sorted(self.prefixes))], is_forgotten=True)

    def _pause(self) -> None:
        session, tenant = self._random.choice(_SESSIONS[1:]), self._random.choice(_TENANTS)
        self._tell("pause", session, tenant, self._random.choice(["stop", "length", "tool_use"]))

    def _end_session(self) -> None:
        self._tell("end", self._random.choice(_SESSIONS[1:]), self._random.choice(_TENANTS))

    def _change_quota(self) -> None:
        """A tenant gets over its quota, so that a policy of its own is made, or the quotas change."""
        self.own = Watched(self._make, self, self.num_blocks // 2) if self.own is None else None
        theirs = [block for block in self.queue if self.prefixes[block][0] == _TENANT]
        if self.own is not None and theirs:
            self.own.free(self._records(theirs))

    def _reset(self) -> None:
        self.own = None
        self._remove([*self.prefixes], is_forgotten=False)

    # Parts of these.

    def _find(self, prefix: Prefix) -> list[int]:
        """Return the blocks of the longest cached beginning of a prefix."""
        tenant, held = prefix
        found: list[int] = []
        while len(found) < len(held) and (tenant, held[: len(found) + 1]) in self.holders:
            found.append(self.holders[tenant, held[: len(found) + 1]][0])
        return found

    def _hold(self, blocks: list[int]) -> None:
        """Give blocks one more owner."""
        used = [block for block in blocks if block in self.queue]
        self.queue = [block for block in self.queue if block not in used]
        self._leave("use", used)
        self._num_owners.update(blocks)

    def _evict(self, num_blocks: int) -> None:
        """Make at least one block empty, and at most `num_blocks` by the policy's choice."""
        asked = self.own if self.own is not None and self.own.known and self._random.random() < 0.5 else self.main
        victim = asked.victim(num_blocks)
        if victim is None:
            gone = [next(block for block in self.queue if block in asked.known)]
        elif len(self.holders[self.prefixes[victim]]) > 1:
            gone = [victim]
        else:
            below = [block for block in self.queue if self._is_below(block, victim)]
            gone = sorted(below, key=lambda block: -len(self.prefixes[block][1]))[:num_blocks]
        self._remove(gone, is_forgotten=False)

    def _remove(self, blocks: list[int], *, is_forgotten: bool) -> None:
        """Stop caching blocks and what only they lead to. is_forgotten: the view has no digests for them any more."""
        gone = dict.fromkeys(blocks)
        for block in blocks:
            if gone.keys() >= {*self.holders[self.prefixes[block]]}:
                gone.update(dict.fromkeys([other for other in self.prefixes if self._is_below(other, block)]))
        if is_forgotten:
            for block in gone:
                self._uncache(block)
        self._leave("remove", [block for block in gone if block in self.queue])
        for block in gone:
            if block in self.queue:
                self.queue.remove(block)
                self.empty.append(block)
            if not is_forgotten:
                self._uncache(block)

    def _is_below(self, block: int, other: int) -> bool:
        """Whether a cached block holds the same prefix as another one, or a continuation of it."""
        (tenant, held), (other_tenant, beginning) = self.prefixes[block], self.prefixes[other]
        return tenant == other_tenant and held[: len(beginning)] == beginning

    def _uncache(self, block: int) -> None:
        prefix = self.prefixes.pop(block)
        self.holders[prefix].remove(block)
        if not self.holders[prefix]:
            del self.holders[prefix]
        self._num_hits.pop(block, None)
        self._givers.pop(block, None)

    def _free(self, blocks: list[int]) -> None:
        """Cached blocks became free, in this order."""
        self.queue += blocks
        records = self._records(blocks)
        theirs = [record for record in records if record.tenant == _TENANT]
        if self.own is not None and theirs:
            self.own.free(theirs)
        if records:
            self.main.free(records)

    def _records(self, blocks: list[int]) -> list[FreeBlock]:
        found: list[FreeBlock] = []
        for block in blocks:
            (tenant, held), givers = self.prefixes[block], self._givers.get(block, [None])
            record = FreeBlock(block, len(held) - 1, tenant, givers[-1], self._num_hits[block], tuple(givers[:-1]))
            found.append(record)
        return found

    def _leave(self, call: str, blocks: list[int]) -> None:
        for policy in (self.main, self.own):
            if policy is not None:
                policy.leave(call, blocks)

    def _tell(self, call: str, session: Hashable, tenant: str | None, *more: str) -> None:
        if self.own is not None and tenant == _TENANT:
            self.own.tell(call, session, tenant, *more)
        self.main.tell(call, session, tenant, *more)
