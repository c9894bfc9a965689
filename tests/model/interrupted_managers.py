"""The managers that `test_interruption.py` interrupts: kinds of them, in the middle of their work, and their calls."""

from array import array
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

import kvblocks
from kvblocks import BlockIdentity, EventOptions, FullAttention, KVCacheManager, Sequence, SlidingWindow, Tier
from model.interruption import Case

PROMPT = list(range(12))
OLD = list(range(100, 116))
TENANT = "tenant"

_TIERS_BELOW = [
    Tier("host", 32, 100),
    Tier("disk", 32, 100, store="reused", is_persistent=True),
    Tier("store", 8, 100, store="reused", min_store_tokens=1000, is_persistent=True, medium="SHARED"),
]

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "named": {"enable_events": True, "num_history_blocks": 8},
    "quotas": {},
    "sampled": {},
    "policies": {"eviction": "s3fifo"},
    "sessions": {"eviction": "sessions"},
    "debug": {"debug": True},
    "grouped": {"groups": [FullAttention(4), SlidingWindow(2, 6)], "enable_events": True},
    "virtual blocks": {"groups": [SlidingWindow(4, 8)]},
    "tiers": {"tiers": _TIERS_BELOW, "enable_events": EventOptions(hits=True, tiers=True)},
    "grouped tiers": {
        "tiers": _TIERS_BELOW,
        "groups": [FullAttention(4), SlidingWindow(4, 6)],
        "enable_events": EventOptions(hits=True, tiers=True),
    },
}
BELOW = list(range(700, 713))
_FIRST_KEPT = BlockIdentity(b"", b"", bytes(16))
RESTORED = [
    (2, _FIRST_KEPT),
    (5, BlockIdentity(_FIRST_KEPT.digest(), b"", bytes(16))),
    (6, BlockIdentity(_FIRST_KEPT.digest(), b"", b"", 1)),
]


class Odd:
    """An object whose `__index__` raises."""

    def __index__(self) -> int:
        raise TypeError("no number")


class World:
    """A manager with a pin, cached prefixes of ended sequences, and running ones, each before another boundary."""

    def __init__(self, kind: str) -> None:
        options = KINDS[kind]
        self.kind = kind
        num_blocks = {0: 23, 1: 40, 2: 80}[len(options.keys() & {"groups", "tiers"})]
        self.manager = KVCacheManager(num_blocks, None if "groups" in options else 4, **options)
        self.num_groups = len(self.manager.groups)
        self.sequences: dict[Any, Sequence] = {}
        self.times = count()
        self.batch: list[Sequence] = []
        if kind == "sampled":
            self.sampler = self.manager._start_sampling(1, lambda: float(next(self.times)), (4.0, 16.0))  # noqa: SLF001
        if kind in ("quotas", "policies", "sessions"):
            self.manager.quotas.set(TENANT, 2)
        if "tiers" in KINDS[kind]:
            self.fill_tiers()
        for name, tokens in (("first", [*PROMPT, 90]), ("old", OLD), ("tenant", list(range(200, 212)))):
            self.start(name, tokens, salt=TENANT if name == "tenant" else None)
            self.manager.free(self.sequences[name])
        self.pin = self.manager.pins.pin(OLD, priority=50, expires_at=5)
        self.start("a", [*PROMPT[:8], 50, 51, 52, 53, 54, 55])
        self.sequences["child"] = self.manager.fork(self.sequences["a"], "child")
        self.start("chunked", list(range(300, 311)), 6)
        self.start("d", [400, 401, 402, 403, 404, 405, 406])
        self.start("e", [500, 501, 502, 503, 504])
        self.start("f", list(range(600, 608)))
        self.held = self.manager.holds.write(self.sequences["f"])
        self.new = self.add("new", [*PROMPT, 91, 92, 93, 94])
        self.hit = self.manager.get_computed_blocks(self.new)
        if "tiers" in KINDS[kind]:
            self.load()

    def fill_tiers(self) -> None:
        """Have a prefix that is in the host alone."""
        self.start("stored", BELOW)
        self.manager.free(self.sequences["stored"])
        while transfers := self.manager.tiers.take_transfers():
            for transfer in transfers:
                self.manager.tiers.complete(transfer, ok=True)
        self.start("spill", list(range(1000, 1000 + 4 * (self.manager.num_free_blocks // self.num_groups))))
        self.manager.abort(self.sequences["spill"], 0)
        self.manager._pool.uncache([block for block in self.manager.blocks if block.is_cached])  # noqa: SLF001

    def load(self) -> None:
        """Begin a load and a store, and have another load queued."""
        for name in ("loading", "queued", "below"):
            sequence = self.add(name, BELOW)
            hit = self.manager.get_computed_blocks(sequence)
            self.loads = self.manager.tiers.find(hit)
            if name != "below":
                assert self.manager.tiers.allocate(sequence, hit, self.loads) is not None
            if name == "loading":
                self.transfers = self.manager.tiers.take_transfers()
        assert {transfer.is_load for transfer in self.transfers} == {True, False}

    def add(self, name: str, tokens: list[int], **options: Any) -> Sequence:
        if self.kind == "sessions":
            options["session"] = "chat"
        self.sequences[name] = sequence = Sequence(name, tokens, **options)
        return sequence

    def start(self, name: str, tokens: list[int], num_new: int | None = None, **options: Any) -> None:
        sequence = self.add(name, tokens, **options)
        hit = self.manager.get_computed_blocks(sequence)
        assert self.manager.allocate_slots(sequence, num_new, hit=hit) is not None, name

    def look(self) -> dict[str, Any]:
        """Return all that a manager's future depends on, and all that it tells. Changes nothing."""
        manager: Any = self.manager
        found: dict[str, Any] = {
            "free": manager.inspect.free_block_ids(),
            "stats": manager.stats,
            "refusal": manager.last_refusal,
            "quotas": list(manager.quotas),
            "pins": [(pin.has_ended, pin.num_held_blocks, [b.block_id for b in pin.blocks]) for pin in manager.pins],
            "usage": manager.inspect.group_usage(),
            "holds": [(hold.is_released, hold.num_blocks) for hold in manager.holds],
            "copies": list(manager._slots.copies),  # noqa: SLF001  # `take_copies` would forget them
            "events": [] if manager._recording is None else [*manager._recording.log.records],  # noqa: SLF001
            "policies": self.told(),
            "sampler": self.lives(),
            "runs": [(bytes(run.tokens), [b.block_id for b in run.blocks]) for run in manager._index.runs()],  # noqa: SLF001
        }
        if "tiers" in KINDS[self.kind]:
            found["tiers"] = self.look_below()
        live = {sequence.sequence_id: sequence for sequence in manager._sequences.values()}  # noqa: SLF001
        for name, sequence in {**self.sequences, **live}.items():
            found[f"sequence {name}"] = self.look_at(sequence)
        for tokens in (PROMPT, OLD, list(range(300, 312)), list(range(400, 416))):
            hit = manager.get_computed_blocks(Sequence("probe", tokens))
            found[f"hit {tokens[0]}"] = (hit.num_tokens, [b.block_id for b in hit.blocks], hit.pending_tokens)
        return found

    def look_below(self) -> Any:
        traffic: Any = self.manager._transfers  # noqa: SLF001
        pools = [
            (pool.pool.free_block_ids(), pool.stats(), list(pool.store_queue._ends.values()), len(pool.storing))  # noqa: SLF001
            for pool in traffic.pools
        ]
        quotas = [self.manager.tiers.quotas(pool.name) for pool in traffic.pools]
        changes = [pool.changes.look() for pool in traffic.pools if pool.changes is not None]
        jobs = [(type(job).__name__, job.num_open, job.num_good) for job in traffic._jobs]  # noqa: SLF001
        moving = [transfer.generation for transfer in (*traffic._queue, *traffic.begun)]  # noqa: SLF001
        loading = [sequence.sequence_id for sequence in traffic._loading]  # noqa: SLF001
        states = [transfer.state for transfer in self.transfers]
        return pools, quotas, changes, jobs, moving, loading, states, self.manager.tiers.num_stale_answers

    def told(self) -> Any:
        """What eviction policies were told."""
        eviction: Any = self.manager._eviction  # noqa: SLF001
        if self.kind != "policies":
            return None
        main = eviction._main  # noqa: SLF001
        policy = main._victim.__self__  # noqa: SLF001
        orders = [list(policy._small), list(policy._main.items()), list(policy._ghosts)]  # noqa: SLF001
        return list(main.blocks), sorted(eviction._own), dict(eviction._hits), orders  # noqa: SLF001

    def lives(self) -> Any:
        if self.kind != "sampled":
            return None
        sampler = self.manager._sampler  # noqa: SLF001
        return sampler and [
            (h.values().counts, h.total) for h in (sampler.lifetimes, sampler.idle_times, sampler.reuse_gaps)
        ]

    def look_at(self, sequence: Sequence) -> Any:
        numbers = (sequence.num_computed_tokens, sequence.num_readonly_tokens, sequence.num_cached_blocks)
        numbers += (sequence.num_written_tokens,)
        tables = []
        if sequence.is_allocated:
            tables = [list(sequence.group_block_ids(group)) for group in range(self.num_groups)]
        epoch = sequence.epoch is None or sequence.epoch.is_current
        return (sequence.token_ids(), numbers, tables, sequence.is_allocated, epoch)

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Return every call that a broken manager must refuse, each on every sequence where it takes one."""
        manager = self.manager
        calls: dict[str, Callable[[], Any]] = {
            "get_computed_blocks": lambda: manager.get_computed_blocks(Sequence("probe", PROMPT)),
            "free_block_ids": manager.inspect.free_block_ids,
            "explain": lambda: manager.inspect.explain(Sequence("probe", PROMPT)),
            "group_usage": manager.inspect.group_usage,
            "pending_tokens": lambda: self.hit.pending_tokens,
            "check": manager.check,
            "reset_prefix_cache": manager.reset_prefix_cache,
            "forget_salt": lambda: manager.forget_salt(TENANT),
            "pin": lambda: manager.pins.pin(OLD),
            "unpin": lambda: manager.pins.unpin(self.pin),
            "expire_pins": lambda: manager.pins.expire(9),
            "evict_blocks": lambda: manager.evict_blocks([1]),
            "block_hashes": lambda: manager.inspect.block_hashes(Sequence("probe", PROMPT)),
            "release": lambda: manager.holds.release(self.held),
            "take_copies": manager.take_copies,
            "watch_blocks": lambda: manager._watch_blocks(len, len),  # noqa: SLF001
            "start_sampling": lambda: manager._start_sampling(1, lambda: 0.0, (1.0,)),  # noqa: SLF001
            "stop_sampling": lambda: manager._stop_sampling(self.manager._sampler),  # noqa: SLF001  # type: ignore[arg-type]
        }
        if self.kind != "virtual blocks":
            calls["prefix_rows"] = manager.inspect.prefix_rows
            calls["to_dot"] = manager.inspect.to_dot
            calls["shared_prefixes"] = lambda: manager.inspect.shared_prefixes([])
            calls["set_quota"] = lambda: manager.quotas.set(TENANT, 1)
            calls["set_default_quota"] = lambda: manager.quotas.set_default(1)
        if KINDS[self.kind].get("enable_events"):
            calls["take_events"] = manager.take_events
        if "tiers" in KINDS[self.kind]:
            calls["find"] = lambda: manager.tiers.find(self.hit)
            calls["take_transfers"] = manager.tiers.take_transfers
            calls["complete"] = lambda: manager.tiers.complete(self.transfers[0], ok=True)
            calls["give_up"] = lambda: manager.tiers.give_up(self.sequences["loading"])
            calls["set_quota below"] = lambda: manager.tiers.set_quota("host", TENANT, 1)
            calls["set_default_quota below"] = lambda: manager.tiers.set_default_quota("host", 1)
            calls["take_changes"] = manager.tiers.take_changes
            calls["restore"] = lambda: manager.tiers.restore("store", [])
        for name, sequence in self.sequences.items():
            calls |= self.calls_for(name, sequence)
        return calls

    def calls_for(self, name: str, sequence: Sequence) -> dict[str, Callable[[], Any]]:
        manager = self.manager
        calls: dict[str, Callable[[], Any]] = {
            "get_computed_blocks": lambda: manager.get_computed_blocks(sequence),
            "allocate_slots": lambda: manager.allocate_slots(sequence),
            "append_slots": lambda: manager.append_slots(sequence, [1]),
            "append_slots of two": lambda: manager.append_slots(sequence, [1, 2]),
            "append_step": lambda: manager.append_step([sequence], [1]),
            "allocate_slots of a total": lambda: manager.allocate_slots(sequence, 0, num_total_tokens=40),
            "cache_blocks": lambda: manager.cache_blocks(sequence, 0),
            "free": lambda: manager.free(sequence),
            "abort": lambda: manager.abort(sequence, 0),
            "fork": lambda: manager.fork(sequence, "another"),
            "truncate": lambda: manager.truncate(sequence, sequence.num_prompt_tokens),
            "renew": lambda: manager.renew(sequence),
            "rewind": lambda: manager.rewind(sequence, 0),
            "get_num_blocks_to_allocate": lambda: manager.get_num_blocks_to_allocate(sequence, 4),
            "read": lambda: manager.holds.read(sequence),
            "write": lambda: manager.holds.write(sequence),
            "detach": lambda: manager.holds.detach(sequence),
        }
        return {f"{call} of {name}": function for call, function in calls.items()}

    def salvage(self) -> None:
        """Check that another manager refuses a broken one's running sequences, and serves all others and their ids."""
        other = _other_manager(self.kind)
        for name, sequence in self.sequences.items():
            if sequence.is_allocated:
                try:
                    other.allocate_slots(sequence)
                except kvblocks.SequenceStateError:
                    pass
                else:
                    raise AssertionError(f"{sequence}: taken by another manager")
            else:
                assert other.allocate_slots(sequence) is not None
                other.free(sequence)
            anew = Sequence(name, sequence.token_ids())
            assert other.allocate_slots(anew, hit=other.get_computed_blocks(anew)) is not None
            other.free(anew)
        other.check()


@cache
def _other_manager(kind: str) -> KVCacheManager:
    options = KINDS[kind]
    return KVCacheManager(200, None if "groups" in options else 4, **options)


def _cow(world: World) -> None:
    world.manager.append_slots(world.sequences["a"], [70])


def _reset(world: World) -> None:
    world.manager.reset_prefix_cache()


def _delayed(world: World) -> None:
    world.manager.append_slots(world.sequences["e"], list(range(510, 519)), delay_cache_blocks=True)


def _drained(world: World) -> None:
    """Take all but the last free blocks, so that the next call evicts blocks and makes pins give blocks up."""
    size = 4 * (world.manager.num_free_blocks // world.num_groups - 1)
    while size > 0 and world.manager.allocate_slots(world.add("drain", list(range(800, 800 + size)))) is None:
        size -= 4


def _emptied(world: World) -> None:
    """Empty the tiers, with no transfers under way."""
    for transfer in world.transfers:
        world.manager.tiers.complete(transfer, ok=False)
    world.manager.reset_prefix_cache()


def unknown(world: World, name: str, number: int) -> Any:
    """Make room for more tokens than are known."""
    sequence = world.sequences[name]
    return world.manager.allocate_slots(sequence, 0, num_total_tokens=sequence.num_tokens + number)


CALLS: dict[str, Callable[[World], Any]] = {
    "sessions.pause": lambda w: w.manager.sessions.pause("chat", "tool_use", TENANT),
    "sessions.end": lambda w: w.manager.sessions.end("chat"),
    "allocate_slots with a hit": lambda w: w.manager.allocate_slots(w.new, hit=w.hit),
    "allocate_slots of a part": lambda w: w.manager.allocate_slots(
        w.new, 2, hit=w.hit, num_total_tokens=w.hit.num_tokens + 5
    ),
    "allocate_slots evicting": lambda w: w.manager.allocate_slots(w.sequences["big"]),
    "allocate_slots refused": lambda w: w.manager.allocate_slots(w.sequences["huge"]),
    "allocate_slots of a tenant": lambda w: w.manager.allocate_slots(w.sequences["of tenant"]),
    "allocate_slots of the next chunk": lambda w: w.manager.allocate_slots(w.sequences["chunked"]),
    "append_slots": lambda w: w.manager.append_slots(w.sequences["e"], [7]),
    "append_slots filling": lambda w: w.manager.append_slots(w.sequences["d"], [7]),
    "append_slots growing": lambda w: w.manager.append_slots(w.sequences["f"], [7]),
    "append_slots copying": lambda w: w.manager.append_slots(w.sequences["a"], [7]),
    "append_slots of five": lambda w: w.manager.append_slots(w.sequences["e"], [7, 8, 9, 10, 11]),
    "append_slots of a buffer": lambda w: w.manager.append_slots(w.sequences["e"], array("I", [7])),
    "append_slots of nonsense": lambda w: w.manager.append_slots(w.sequences["e"], [Odd()]),
    "append_step": lambda w: w.manager.append_step(w.batch, [1, 2, 3, 4, 5]),
    "append_step of nonsense": lambda w: w.manager.append_step(w.batch, [1, 2, 3, Odd(), 5]),
    "allocate_slots delayed": lambda w: w.manager.allocate_slots(w.new, hit=w.hit, delay_cache_blocks=True),
    "append_slots delayed": lambda w: w.manager.append_slots(w.sequences["e"], [7, 8, 9], delay_cache_blocks=True),
    "append_step delayed": lambda w: w.manager.append_step(w.batch, [1] * 5, delay_cache_blocks=True),
    "cache_blocks": lambda w: w.manager.cache_blocks(w.sequences["e"], 12),
    "allocate_slots of external tokens": lambda w: w.manager.allocate_slots(
        w.new, 1, hit=w.hit, num_external_computed_tokens=3
    ),
    "allocate_slots of a total": lambda w: w.manager.allocate_slots(w.sequences["chunked"], num_total_tokens=14),
    "allocate_slots of a cut hit": lambda w: w.manager.allocate_slots(w.new, hit=w.hit.cut(4)),
    "get_num_blocks_to_allocate": lambda w: w.manager.get_num_blocks_to_allocate(w.new, 20, hit=w.hit),
    "rewind": lambda w: w.manager.rewind(w.sequences["long"], 9),
    "evict_blocks": lambda w: w.manager.evict_blocks([b.block_id for b in w.sequences["a"].blocks[:1]]),
    "read": lambda w: w.manager.holds.read(w.sequences["a"]),
    "detach": lambda w: w.manager.holds.detach(w.sequences["d"]),
    "release": lambda w: w.manager.holds.release(w.held),
    "allocate_slots of unknown tokens": lambda w: unknown(w, "e", 6),
    "allocate_slots of unknown tokens, copying": lambda w: unknown(w, "a", 3),
    "free": lambda w: w.manager.free(w.sequences["d"]),
    "free of a child": lambda w: w.manager.free(w.sequences["a"]),
    "abort": lambda w: w.manager.abort(w.sequences["f"], 4),
    "abort of what others are attached to": lambda w: w.manager.abort(w.sequences["a"], 0),
    "fork": lambda w: w.manager.fork(w.sequences["e"], "fork of e"),
    "truncate": lambda w: w.manager.truncate(w.sequences["long"], 9),
    "truncate of what isn't written": lambda w: w.manager.truncate(w.sequences["long"], 9, num_computed_tokens=10),
    "reset_prefix_cache": lambda w: w.manager.reset_prefix_cache(),
    "forget_salt": lambda w: w.manager.forget_salt(None),
    "pin": lambda w: w.manager.pins.pin(PROMPT, priority=100),
    "unpin": lambda w: w.manager.pins.unpin(w.pin),
    "expire_pins": lambda w: w.manager.pins.expire(7),
    "take_copies": lambda w: w.manager.take_copies(),
    "stop_sampling": lambda w: w.manager._stop_sampling(w.manager._sampler),  # noqa: SLF001
    "get_computed_blocks": lambda w: w.manager.get_computed_blocks(w.new),
    "explain": lambda w: w.manager.inspect.explain(w.new),
}
_QUOTAS = {
    "set_quota": lambda w: w.manager.quotas.set(TENANT, 1),
    "set_quota to none": lambda w: w.manager.quotas.set(TENANT, None),
    "set_default_quota": lambda w: w.manager.quotas.set_default(1),
}
_TIERS: dict[str, Callable[[World], Any]] = {
    "take_transfers": lambda w: w.manager.tiers.take_transfers(),
    "complete a load": lambda w: w.manager.tiers.complete(w.transfers[0], ok=True, seconds=1.0),
    "complete a load that failed": lambda w: w.manager.tiers.complete(w.transfers[0], ok=False),
    "complete a store": lambda w: w.manager.tiers.complete(w.transfers[-1], ok=True),
    "complete a store that failed": lambda w: w.manager.tiers.complete(w.transfers[-1], ok=False),
    "give_up": lambda w: w.manager.tiers.give_up(w.sequences["loading"]),
    "allocate_slots with loads": lambda w: w.manager.tiers.allocate(w.sequences["below"], None, w.loads),
    "free of a loading one": lambda w: w.manager.free(w.sequences["loading"]),
    "free of a queued one": lambda w: w.manager.free(w.sequences["queued"]),
    "fork of a loading one": lambda w: w.manager.fork(w.sequences["loading"], "loading, too"),
    "rewind of a loading one": lambda w: w.manager.rewind(w.sequences["loading"], 5),
    "set_quota below": lambda w: w.manager.tiers.set_quota("host", TENANT, 1),
    "set_default_quota below": lambda w: w.manager.tiers.set_default_quota("host", 1),
    "take_changes": lambda w: w.manager.tiers.take_changes(),
    "restore": lambda w: w.manager.tiers.restore("store", RESTORED),
    "evict_blocks that are loading": lambda w: w.manager.evict_blocks(w.sequences["loading"].block_ids),
}
_EVENTS = {"take_events": lambda w: w.manager.take_events()}
# What is done to the world before a call, by its name.
_FIRST: dict[str, Callable[[World], Any]] = {
    "take_copies": _cow,
    "restore": _emptied,
    "renew": _reset,
    "cache_blocks": _delayed,
    "allocate_slots evicting": _drained,
    "append_slots growing": _drained,
}


def names_of(kind: str) -> list[str]:
    """Return the names of the calls that a kind of manager has."""
    if kind == "debug":
        return ["append_slots", "append_slots copying", "append_slots of nonsense", "free"]
    names = [*CALLS, "renew"]
    if kind != "virtual blocks":
        names += _QUOTAS
    if KINDS[kind].get("enable_events"):
        names += _EVENTS
    if "tiers" in KINDS[kind]:
        names += _TIERS
    return names


def make_case(kind: str, name: str) -> Case:
    """Return a call of a manager of some kind, which is in the same state each time."""
    world = World(kind)
    manager = world.manager
    world.start("long", list(range(900, 909)))
    assert manager.append_slots(world.sequences["long"], [1, 2, 3]) is not None
    if name in _FIRST:
        _FIRST[name](world)
    world.add("big", list(range(700, 708)))
    world.add("huge", list(range(2000, 2200)))
    world.add("of tenant", [*range(200, 208), *range(240, 252)], salt=TENANT)
    world.batch = [world.sequences[name] for name in ("a", "child", "d", "e", "f")]
    calls = {**CALLS, **_QUOTAS, **_EVENTS, **_TIERS, "renew": lambda w: w.manager.renew(w.sequences["a"])}
    manager.check()
    return Case(lambda: calls[name](world), world.look, manager.check, world.calls(), world.salvage)
