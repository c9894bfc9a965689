"""Histories of a manager with an eviction policy, compared with a reference model that asks policies, too.

`kvblocks.retention.policies.check_policy` checks what a policy does. What a manager does with it is compared here: a
policy runs in two worlds, in a manager and in the reference model, which tells and asks an instance of its own as
docs/policies.md says. Both instances must be told the same, and the manager must take the same blocks as the model. A
policy's behaviour may depend only on what it is told. This allows built-in, random and malicious policies. The memory
of `kv_memory` is checked in both worlds.
"""

import random
from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from kvblocks import CacheView, EvictionPolicy, FreeBlock, Group
from kvblocks.hashing.scheme import sha256_digest
from model.group_history import GROUP_OPERATIONS, GroupHistory
from model.history import OPERATIONS, History, RandomChooser
from model.prefix_history import OPERATIONS as PREFIX_OPERATIONS
from model.prefix_history import PrefixHistory, PrefixModel
from model.reference_groups import ReferenceGroups
from model.reference_model import ModelSequence, Prefix, ReferenceModel
from model.where import where

Make = Callable[[CacheView], EvictionPolicy]
Log = list[tuple[Any, ...]]


class Logged:
    """A policy that records what it is told and asked, block by block, however calls group the blocks."""

    def __init__(self, policy: EvictionPolicy, log: Log) -> None:
        self.policy = policy
        self.log = log

    def free(self, blocks: list[FreeBlock]) -> None:
        self.log += [("free", *block) for block in blocks]
        self.policy.free(blocks)

    def use(self, block_ids: list[int]) -> None:
        self.log += [("use", block_id) for block_id in block_ids]
        self.policy.use(block_ids)

    def remove(self, block_ids: list[int]) -> None:
        self.log += [("remove", block_id) for block_id in sorted(block_ids)]
        self.policy.remove(sorted(block_ids))  # what is chained to one block goes in no particular order

    def begin(self, *told: Any) -> None:
        self.tell("begin", told)

    def pause(self, *told: Any) -> None:
        self.tell("pause", told)

    def end(self, *told: Any) -> None:
        self.tell("end", told)

    def tell(self, call: str, told: tuple[Any, ...]) -> None:
        self.log.append((call, *told))
        if hasattr(self.policy, call):
            getattr(self.policy, call)(*told)

    def victim(self, num_blocks: int) -> int | None:
        self.log.append(("asked for", num_blocks))
        return self.policy.victim(num_blocks)


class ReferenceAdviser:
    """An instance of a policy that the model has, and the blocks that it was told of, in that order."""

    def __init__(self, model: Any, num_blocks: int) -> None:
        self.model = model
        self.num_blocks = num_blocks
        self.known: list[int] = []
        self.policy = model.make(self)

    @property
    def now(self) -> float:
        return self.model.now

    def digest(self, block: int) -> bytes | None:
        prefix = self.model.content.get(block) if block in self.known else None
        return None if prefix is None else sha256_digest(repr(prefix[:4]).encode())

    def free(self, records: list[FreeBlock]) -> None:
        self.known += [record.block_id for record in records]
        self.tell(self.policy.free, records)

    def leave(self, tell: Any, blocks: list[int]) -> None:
        theirs = [block for block in blocks if block in self.known]
        if theirs:
            self.tell(tell, theirs)
        self.known = [block for block in self.known if block not in theirs]

    def tell(self, call: Any, *what: Any) -> None:
        try:
            call(*what)
        except Exception:  # noqa: BLE001
            self.model.num_failures += 1

    def ask(self, num_blocks: int) -> int | None:
        try:
            answer = self.policy.victim(num_blocks)
            number = None if answer is None else answer.__index__()
        except Exception:  # noqa: BLE001
            answer, number = "none of any use", None
        if answer is None or number in self.known:
            return number
        self.model.num_failures += 1
        return None


class Advised:
    """What a reference model does differently with policies."""

    def begin(self, make: Make, num_real: int, num_blocks: int) -> None:
        """num_real: ids of blocks are below it; others are virtual blocks'."""
        self.make = make
        self.num_blocks_end = num_real
        self.num_failures = 0
        self.now = 0.0
        self.hits: Counter[int] = Counter()
        self.givers: dict[int, list[Any]] = {}
        self.giver: ModelSequence | None = None
        self.starting: ModelSequence | None = None
        self.own: dict[str | None, ReferenceAdviser] = {}
        self.main = ReferenceAdviser(self, num_blocks)

    def order_of_reuse(self) -> list[int]:
        raise NotImplementedError

    # What policies are told.

    def hold(self, blocks: list[int]) -> None:
        if blocks:
            self.tell_begin()
        super().hold(blocks)
        for adviser in (self.main, *self.own.values()):
            adviser.leave(adviser.policy.use, blocks)

    def tell_begin(self) -> None:
        sequence, self.starting = self.starting, None
        if sequence is not None:
            self.tell_session(sequence.salt, "begin", sequence.session, sequence.salt)

    def tell_session(self, salt: str | None, call: str, *told: Any) -> None:
        own = [self.own[salt]] if salt in self.own else []
        for adviser in (*own, self.main):
            adviser.tell(getattr(adviser.policy, call), *told)

    def free(self, sequence: ModelSequence) -> None:
        self.giver = sequence
        super().free(sequence)
        self.giver = None

    def truncate(self, sequence: ModelSequence, *to: Any) -> None:
        self.giver = sequence
        super().truncate(sequence, *to)
        self.giver = None

    def drop(self, blocks: list[int]) -> list[int]:
        released = super().drop(blocks)
        renewed = [block for block in released if block not in blocks]
        for adviser in (self.main, *self.own.values()):
            adviser.leave(adviser.policy.use, renewed)
        blocks = released
        if self.giver is not None:
            for block in blocks:
                if block in self.content:
                    before = [session for session in self.givers.get(block, []) if session != self.giver.session]
                    self.givers[block] = [*before, self.giver.session][-8:]
        freed = [b for b in reversed(blocks) if not self.owners[b] and b in self.content and b < self.num_blocks_end]
        records = [self.record(block) for block in freed]
        for salt, adviser in self.own.items():
            theirs = [record for record in records if record.tenant == salt]
            if theirs:
                adviser.free(theirs)
        if records:
            self.main.free(records)
        return released

    def record(self, block: int) -> FreeBlock:
        prefix = self.content[block]
        depth, givers = len(prefix[2]) // self.block_size - 1, self.givers.get(block, [None])
        return FreeBlock(block, depth, prefix[0], givers[-1], self.hits[block], tuple(givers[:-1]))

    def requeue_detached(self) -> None:
        self.tell_gone(sorted(self.detached))
        super().requeue_detached()

    def tell_gone(self, blocks: list[int]) -> None:
        for block in blocks:
            self.hits.pop(block, None)
            self.givers.pop(block, None)
        for adviser in (self.main, *self.own.values()):
            adviser.leave(adviser.policy.remove, blocks)

    def reset(self, sequences: list[ModelSequence]) -> None:
        self.main.leave(self.main.policy.remove, list(self.main.known))
        self.own.clear()
        self.hits.clear()
        self.givers.clear()
        super().reset(sequences)

    def set_quota(self, salt: str | None, quota: int | None) -> None:
        self.own.clear()
        super().set_quota(salt, quota)

    def set_default_quota(self, quota: int | None) -> None:
        self.own.clear()
        super().set_default_quota(quota)

    def grow(self, sequence: ModelSequence, end: int, hit: list[int], *how: Any) -> bool:
        is_start = not sequence.is_allocated
        self.starting = sequence if is_start and sequence.session is not None else None
        done = super().grow(sequence, end, hit, *how)
        self.starting = None
        if done and is_start:
            self.hits.update(block for block in hit if block < self.num_blocks_end)
        return done

    # What they are asked.

    def take_next(self, max_blocks: int) -> list[int]:
        self.tell_begin()
        order = self.order_of_reuse()
        if order[0] not in self.content:
            blocks = list(takewhile(lambda block: block not in self.content, order))[:max_blocks]
        else:
            blocks = self.choose(order, max_blocks)
        self.tell_gone(blocks)
        super().hold(blocks)
        for block in blocks:
            self.forget(block, "evicted")
        self.requeue_detached()
        return blocks

    def choose(self, order: list[int], max_blocks: int) -> list[int]:
        for salt in self.over:
            theirs = [block for block in order if block in self.content and self.content[block][0] == salt]
            if theirs:
                excess = self.num_cached(salt) - self.all_quotas()[salt]
                return self.advised(self.adviser_of(salt, theirs), theirs[0], min(max_blocks, excess))
        if order[0] not in self.main.known:
            return [order[0]]
        return self.advised(self.main, order[0], max_blocks)

    def adviser_of(self, salt: str | None, theirs: list[int]) -> ReferenceAdviser:
        if salt not in self.own:
            self.own[salt] = ReferenceAdviser(self, max(1, self.all_quotas()[salt]))
            self.own[salt].free([self.record(block) for block in theirs])
        return self.own[salt]

    def advised(self, adviser: ReferenceAdviser, fallback: int, max_blocks: int) -> list[int]:
        victim = adviser.ask(max_blocks)
        if victim is None:
            return [fallback]
        prefix = self.content[victim]
        if len(prefix) > 4 or len(self.cached[prefix]) > 1:  # attached, or held by another block, too
            return [victim]
        return self.below(prefix)[:max_blocks]

    def below(self, prefix: Prefix) -> list[int]:
        """The free blocks of a prefix and what is chained to it: ends first, the least recently used branch first."""
        end = len(prefix[2]) + self.block_size
        longer = [p for p in self.cached if len(p) == 4 and len(p[2]) == end and self.hangs_from(p, prefix)]
        age = {block: number for number, block in enumerate(self.main.known)}
        longer.sort(key=lambda p: age.get(self.cached[p][0], len(age)))
        blocks = [block for branch in longer for block in self.below(branch)]
        return blocks + [block for block in self.cached[prefix] if not self.owners[block]]


class AdvisedModel(Advised, ReferenceModel):
    def order_of_reuse(self) -> list[int]:
        return self.queue

    def take(self, num_blocks: int) -> list[int]:
        while len(self.queue) < num_blocks:
            pin = min((pin for pin in self.pins if pin.held), key=lambda pin: pin.priorities[len(pin.held) - 1])
            self.drop([pin.held.pop()])
        taken: list[int] = []
        while len(taken) < num_blocks:
            taken += self.take_next(num_blocks - len(taken))
        return taken


class AdvisedGroups(Advised, ReferenceGroups):
    def order_of_reuse(self) -> list[int]:
        return self.order()

    def take_one(self) -> int:
        return self.take_next(1)[0]


def logged(make: Make, log: Log) -> Make:
    return lambda cache: Logged(make(cache), log)


class Contract:
    """A history, the logs of both worlds' policies, and what must have been met."""

    def __init__(self, make: Make, history: History, model: Any) -> None:
        self.history = history
        self.real: Log = []
        self.expected: Log = []
        first = history.manager.first_block_id
        history.sessions = (None, "a", "b", "a", "c")
        model.begin(logged(make, self.expected), first + history.manager.num_blocks, history.manager.num_blocks)
        history.model = model
        self.counts: Counter[str] = Counter()

    def walk(self, operations: list[Any], chooser: RandomChooser, num_operations: int, reset_every: int = 150) -> None:
        history = self.history
        for number in range(1, num_operations + 1):
            operation = chooser.choose(operations)
            with where(chooser.seed, number, operation):
                operation(history, chooser)
                if number % reset_every == 0:
                    history.reset(chooser)
                if number % 10 == 0:
                    history.manager.now = history.model.now = number
                if number % 7 == 0:
                    self.tell(number)
                self.check()

    def tell(self, number: int) -> None:
        """Let a session pause or end: a known or unknown one, of any tenant."""
        session, salt, model = "abcd"[number % 4], (None, "salt", "other salt")[number % 3], self.history.model
        if number % 5 == 0:
            self.history.manager.sessions.end(session, salt)
            model.tell_session(salt, "end", session, salt)
        else:
            reason = ("stop", "tool_use")[number % 2]
            self.history.manager.sessions.pause(session, reason, salt)
            model.tell_session(salt, "pause", session, salt, reason)

    def check(self) -> None:
        self.history.check()
        # The order between kinds is not promised, that within one is.
        for kind in ("free", "use", "remove", "begin", "pause", "end"):
            told = [[entry for entry in log if entry[0] == kind] for log in (self.real, self.expected)]
            if kind == "remove":
                told = [sorted(entries) for entries in told]
            assert told[0] == told[1]
            self.counts[kind] += len(told[0])
        asked = [[entry for entry in log if entry[0] == "asked for"] for log in (self.real, self.expected)]
        assert asked[0] == asked[1]
        self.counts["asked"] += len(asked[0])
        self.counts["several wanted"] += sum(number > 1 for _, number in asked[0])
        self.counts["hit"] += sum(entry[0] == "free" and entry[5] > 0 for entry in self.real)
        self.counts["of sessions"] += sum(entry[0] == "free" and len({entry[4], *entry[6]}) > 1 for entry in self.real)
        self.counts["of tenants"] += len(self.history.model.own)
        self.real.clear()
        self.expected.clear()
        failures = self.history.manager.stats.num_eviction_failures
        assert failures == self.history.model.num_failures
        self.counts["failures"] = failures


def compare_in_manager(
    make: Make, num_blocks: int, block_size: int, num_operations: int, seed: int, **options: Any
) -> Any:
    """Walk with one group of layers. make: of the same behaviour each time, in each world and for each tenant."""
    log: Log = []
    history = History(num_blocks, block_size, eviction=logged(make, log), **options)
    contract = Contract(make, history, AdvisedModel(num_blocks, block_size, first_block=history.manager.first_block_id))
    contract.real = log
    operations = [operation for operation, weight in OPERATIONS for _ in range(weight)]
    contract.walk(operations, RandomChooser(seed), num_operations)
    return contract


def compare_in_groups(make: Make, groups: list[Group], num_operations: int, seed: int, **options: Any) -> Any:
    """The same with several groups of layers."""
    log: Log = []
    num_blocks = 10 * len(groups)
    history = GroupHistory(num_blocks, groups, eviction=logged(make, log), **options)
    keeping = frozenset(number for number, group in enumerate(groups) if group.keeps_passed)
    contract = Contract(
        make, history, AdvisedGroups(num_blocks, tuple(groups), True, history.manager.first_block_id, keeping)
    )
    contract.real = log
    operations = [operation for operation, weight in GROUP_OPERATIONS for _ in range(weight)]
    contract.walk(operations, RandomChooser(seed), num_operations)
    return contract


# The same of a `PrefixCache`.


class AdvisedPrefixes(PrefixModel):
    """Its blocks go by their prefixes; a policy knows them by their ids."""

    def begin(self, make: Make) -> None:
        self.make, self.now, self.num_failures = make, 0.0, 0
        self.hits: Counter[int] = Counter()
        self.main = ReferenceAdviser(self, self.max_blocks)

    @property
    def content(self) -> dict[int, Prefix]:
        return {block_id: prefix for prefix, block_id in self.holders.items()}

    def look_up(self, prompt: ModelSequence) -> list[Prefix]:
        self.hits.update(self.ids(self.find(prompt)))
        return super().look_up(prompt)

    def hold(self, path: list[Prefix]) -> None:
        super().hold(path)
        self.main.leave(self.main.policy.use, self.ids(path))

    def let_go(self, path: list[Prefix]) -> None:
        super().let_go(path)
        freed = [prefix for prefix in reversed(path) if not self.num_holds[prefix]]
        records = [
            FreeBlock(i, len(prefix[2]) // self.block_size - 1, prefix[0], None, self.hits[i])
            for prefix, i in zip(freed, self.ids(freed), strict=True)
        ]
        if records:
            self.main.free(records)

    def evict(self, num_blocks: int) -> tuple[list[int], list[object]]:
        number = min(num_blocks, len(self.queue))
        if number == len(self.queue):  # nobody is asked
            self.tell_gone(self.ids(self.queue))
            return super().evict(number)
        evicted: list[int] = []
        payloads: list[object] = []
        while len(evicted) < number:
            victim = self.main.ask(number - len(evicted))
            below = [self.queue[0]] if victim is None else self.below(self.content[victim])
            gone = below[: number - len(evicted)]
            self.tell_gone(self.ids(gone))
            for prefix in reversed(gone):  # they become the first ones, which `PrefixModel.evict` takes
                self.queue.remove(prefix)
                self.queue.insert(0, prefix)
            ids, lost = super().evict(len(gone))
            evicted += ids
            payloads += lost
        return evicted, payloads

    def tell_gone(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.hits.pop(block_id, None)
        self.main.leave(self.main.policy.remove, block_ids)

    def below(self, prefix: Prefix) -> list[Prefix]:
        end = len(prefix[2]) + self.block_size
        longer = [p for p in self.holders if len(p[2]) == end and ReferenceModel.hangs_from(None, p, prefix)]
        longer.sort(key=self.queue.index)
        return [below for branch in longer for below in self.below(branch)] + [prefix]

    def insert(
        self,
        prompt: ModelSequence,
        ids: list[int],
        pin: bool,
        block_bytes: int = 0,
        new: list[tuple[int, object, int]] | None = None,
    ) -> tuple[list[Prefix], int, list[int], list[int], list[object], list[object]]:
        assert not block_bytes, "a policy doesn't know bytes"
        path, found = self.path(prompt), self.find(prompt)
        unused = [i for i, held in zip(ids, self.ids(found), strict=False) if i != held]
        num_missing = len(path) - len(found) - (self.max_blocks - len(self.holders))
        evicted: list[int] = []
        gone: list[object] = []
        if num_missing > 0:
            self.hold(found)
            evicted, gone = self.evict(num_missing)
            self.let_go(found)
        end = min(len(path), len(found) + self.max_blocks - len(self.holders))
        added = path[len(found) : end]
        self.holders.update(zip(added, ids[len(found) : end], strict=True))
        self.sizes.update(dict.fromkeys(added, 0))
        if not pin:
            self.num_holds.update(added)
            self.let_go(added)
        self.hold(found)
        if pin:
            self.hold(added)
        else:
            self.let_go(found)
        self.note_used(path[:end])
        unused_payloads = []
        for number, payload, num_bytes in new or ():
            if number // self.block_size > end or not self.attach(prompt, number, payload, num_bytes):
                unused_payloads.append(payload)
        return path[:end], end - len(found), unused + ids[end:], evicted, gone, unused_payloads


def compare_in_cache(make: Make, max_blocks: int, block_size: int, num_operations: int, seed: int) -> Counter[str]:
    """Walk with a `PrefixCache`. Returns what was met."""
    log: Log = []
    history, chooser = PrefixHistory(max_blocks, block_size, eviction=logged(make, log)), RandomChooser(seed)
    history.model = AdvisedPrefixes(max_blocks, block_size)
    expected: Log = []
    history.model.begin(logged(make, expected))
    operations = [operation for operation, weight in PREFIX_OPERATIONS for _ in range(weight)]
    for number in range(1, num_operations + 1):
        operation = chooser.choose(operations)
        with where(seed, number, operation):
            operation(history, chooser)
            history.check()
            assert sorted(map(repr, log)) == sorted(map(repr, expected))
            history.met["asked"] += sum(entry[0] == "asked for" for entry in log)
            log.clear()
            expected.clear()
            if number % 10 == 0:
                history.cache.now = history.model.now = number
            assert history.cache.inspect.eviction_failure_count() == history.model.num_failures
    history.met["failures"] = history.model.num_failures
    history.end()
    return history.met


# Policies that nobody should write.


class Random:
    """Names any block that it knows, or none."""

    def __init__(self, cache: CacheView) -> None:
        self.cache = cache
        self.random = random.Random(5)
        self.known: dict[int, FreeBlock] = {}

    def free(self, blocks: list[FreeBlock]) -> None:
        for block in blocks:
            assert block.block_id not in self.known
            assert self.cache.digest(block.block_id) is not None
            self.known[block.block_id] = block

    def use(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            del self.known[block_id]

    remove = use

    def victim(self, num_blocks: int) -> int | None:
        assert num_blocks > 0
        return self.random.choice([None, *sorted(self.known)])


class Beginnings(Random):
    """Names where prefixes begin, so that all that is chained to them has to go before."""

    def victim(self, num_blocks: int) -> int | None:
        return min(self.known.values(), key=lambda block: (block.depth, block.block_id)).block_id


class OddAnswer:
    """An answer that looks like an integer and is none."""

    def __index__(self) -> int:
        raise OverflowError


class Malicious(Random):
    """Raises, lies, forgets, breaks what it is given, and asks for what isn't there."""

    def free(self, blocks: list[FreeBlock]) -> None:
        super().free(blocks)
        if self.random.random() < 0.2:
            blocks.clear()
            raise RecursionError

    def use(self, block_ids: list[int]) -> None:
        super().use(block_ids)
        block_ids *= 3
        if self.random.random() < 0.2:
            raise MemoryError

    remove = use

    def victim(self, num_blocks: int) -> Any:
        self.cache.digest(10**30)
        self.cache.digest(-1)
        lies: list[Any] = ["0", -1, 10**30, 0.5, OddAnswer(), [], num_blocks, 1, 2, 3, *range(20), None, True, self]
        answer = self.random.choice(lies + sorted(self.known))
        if answer is self:
            raise ValueError(num_blocks)
        return answer
