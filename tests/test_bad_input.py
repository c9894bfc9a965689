"""Bad input: every public call, every parameter, every odd value, alike in both builds.

`CALLS` is the table. A call with an odd value succeeds if the parameter takes such a value. Otherwise it raises a
KVBlocksError that says what was expected, or passes on what the caller's own code raised, and has changed nothing.
`test_the_table_is_complete` finds a public call or parameter that the table lacks.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from model.odd_values import ODD, Index, Mine, Text

import kvblocks
from kvblocks import (
    BlockIdentity,
    CacheMetrics,
    ChunkedLocal,
    FullAttention,
    InvalidArgumentError,
    KVBlocksError,
    KVCacheManager,
    KVLayer,
    PrefixCache,
    RecurrentState,
    Scratch,
    Sequence,
    SlidingWindow,
    StateInPlace,
    Tier,
    kind_of_layers,
    plan,
)
from kvblocks.hashing.extra_keys import decode_extra_keys

WORLDS = ["plain", "named", "groups"]


class World:
    """Managers, sequences and a cache in the middle of their work, and calls' good arguments."""

    def __init__(self, kind: str) -> None:
        groups = [FullAttention(4), SlidingWindow(4, 6)] if kind == "groups" else None
        options: dict[str, Any] = {"groups": groups} if groups else {"block_size": 4}
        self.manager = manager = KVCacheManager(
            64, **options, enable_events=kind == "named", num_history_blocks=8 * (kind == "named")
        )
        self.old = self._start("old", range(200, 209))
        manager.reset_prefix_cache()
        waiting = self._start("waiting", range(100, 109))
        manager.free(waiting)
        self.waiting = Sequence("waiting", range(100, 109), salt=None, extra_keys=[])
        self.hit = manager.get_computed_blocks(self.waiting)
        self.idle = Sequence("idle", range(300, 309), salt="mine")
        self.running = self._start("running", range(6))
        self.filling = self._start("filling", range(10, 17))
        self.growing = self._start("growing", range(20, 28))
        self.chunked = Sequence("chunked", range(300, 330))
        manager.allocate_slots(self.chunked, 8)
        self.pin = manager.pins.pin(range(100, 108))
        manager.quotas.set("mine", 3)
        self.held = manager.holds.read(self.growing)
        self.other = KVCacheManager(8, 4)
        self.sampled = KVCacheManager(8, 4)
        self.sampler = self.sampled._start_sampling(1, lambda: 0.0, (1.0,))  # noqa: SLF001
        self.cache = PrefixCache(4, 4)
        self.cache.insert_prefix(range(8), [0, 1], pin=True)
        self.cache.insert_prefix(range(50, 54), [2])
        disk = Tier("disk", 8, 100, store="reused", is_persistent=True)
        self.tiered = KVCacheManager(8, 4, tiers=[Tier("host", 16, 100), disk])
        for name, start in (("stored", 0), ("moving", 50)):
            sequence = Sequence(name, range(start, start + 9))
            assert self.tiered.allocate_slots(sequence) is not None
            self.tiered.free(sequence)
            for _ in range(2 if name == "stored" else 1):
                (self.transfer,) = self.tiered.tiers.take_transfers()
                if name == "stored":
                    self.tiered.tiers.complete(self.transfer, ok=True)
        self.sharing = KVCacheManager(8, 4, tiers=[Tier("shared", 8, 100, is_shared=True)])
        filler = Sequence("filler", range(100, 127))
        assert self.tiered.allocate_slots(filler) is not None
        self.tiered.abort(filler, 0)
        self.loading = Sequence("loading", range(9))
        hit = self.tiered.get_computed_blocks(self.loading)
        assert self.tiered.tiers.allocate(self.loading, hit, self.tiered.tiers.find(hit)) is not None
        self.below = Sequence("below", range(9))
        self.tier_hit = self.tiered.get_computed_blocks(self.below)
        self.loads = self.tiered.tiers.find(self.tier_hit)
        assert self.loads
        self.stateful = KVCacheManager(16, groups=[FullAttention(4), RecurrentState(4, 2, 2)])
        self.recurrent = Sequence("recurrent", range(9))
        assert self.stateful.allocate_slots(self.recurrent, 4) is not None
        self.plan = plan([FullAttention(16)], [KVLayer(0, 1, 64)], "float16", 2**20)
        self.sequences = [self.old, self.waiting, self.idle, self.running, self.filling, self.growing, self.chunked]

    def _start(self, name: str, tokens: Any) -> Sequence:
        sequence = Sequence(name, tokens)
        assert self.manager.allocate_slots(sequence) is not None
        return sequence

    def check(self) -> None:
        for manager in (self.manager, self.other, self.sampled, self.tiered, self.sharing, self.stateful):
            manager.check()
        self.cache.check()

    def state(self) -> list[Any]:
        """All that can be seen of it."""
        manager, cache = self.manager, self.cache
        seen: list[Any] = [
            manager.now,
            cache.now,
            self.hit.num_tokens,
            self.hit.pending_tokens,
            manager.inspect.group_usage(),
            manager.inspect.prefix_rows(),
        ]
        below = self.tiered.tiers
        seen += [*below, below.num_stale_answers, *map(below.quotas, ("host", "disk")), *self.sharing.tiers]
        states, recurrent = self.stateful.states, self.recurrent
        seen += [states.num_free_slots, states.stats, states.next_cut(recurrent, 9), recurrent.state_slot]
        for each in (manager, self.other, self.sampled, self.tiered, self.stateful):
            seen += [each.stats, each.inspect.free_block_ids(), list(each.quotas), each.last_refusal]
            seen += [(id(pin), pin.num_held_blocks, pin.expires_at) for pin in each.pins]
            seen += [(id(hold), hold.is_released, hold.block_ids) for hold in each.holds]
        for one in self.sequences:
            seen += [one.token_ids(), one.num_computed_tokens, one.num_readonly_tokens, one.is_allocated]
            seen += [list(one.block_ids), one.sequence_id, one.salt, one.lora, one.extra_keys]
        seen += [
            cache.cached_block_count(),
            cache.evictable_count(),
            cache.stats,
        ]
        seen += [block for block in range(10) if cache.inspect.contains_block(block)]
        return [*seen, cache.inspect.list_pinned()]


class Parameter(NamedTuple):
    """good: of a world, a value that the call takes. takes: the kinds of odd values that it may take."""

    good: Callable[[World], Any]
    takes: str = ""


class Call(NamedTuple):
    target: Callable[[World], Callable[..., Any]]
    parameters: dict[str, Parameter]


def constant(value: Any, takes: str = "") -> Parameter:
    return Parameter(lambda _: value, takes)


def of_world(name: str, takes: str = "") -> Parameter:
    return Parameter(lambda world: getattr(world, name), takes)


def of_manager(name: str, **parameters: Parameter) -> tuple[str, Call]:
    return f"KVCacheManager.{name}", Call(lambda world: getattr(world.manager, name), parameters)


def of_holds(name: str, **parameters: Parameter) -> tuple[str, Call]:
    return f"BlockHolds.{name}", Call(lambda world: getattr(world.manager.holds, name), parameters)


def of_pins(name: str, **parameters: Parameter) -> tuple[str, Call]:
    return f"ManagerPins.{name}", Call(lambda world: getattr(world.manager.pins, name), parameters)


def of_quotas(name: str, **parameters: Parameter) -> tuple[str, Call]:
    return f"ManagerQuotas.{name}", Call(lambda world: getattr(world.manager.quotas, name), parameters)


def of_inspect(name: str, **parameters: Parameter) -> tuple[str, Call]:
    return f"Inspector.{name}", Call(lambda world: getattr(world.manager.inspect, name), parameters)


def of_states(name: str, **parameters: Parameter) -> tuple[str, Call]:
    return f"ManagerStates.{name}", Call(lambda world: getattr(world.stateful.states, name), parameters)


def of_sessions(name: str, **parameters: Parameter) -> tuple[str, Call]:
    return f"Sessions.{name}", Call(lambda world: getattr(world.manager.sessions, name), parameters)


def of_tiers(name: str, **parameters: Parameter) -> tuple[str, Call]:
    return f"Tiers.{name}", Call(lambda world: getattr(world.tiered.tiers, name), parameters)


def of_cache(name: str, **parameters: Parameter) -> tuple[str, Call]:
    return f"PrefixCache.{name}", Call(lambda world: getattr(world.cache, name), parameters)


def of_inspected(name: str, **parameters: Parameter) -> tuple[str, Call]:
    return f"CacheInspector.{name}", Call(lambda world: getattr(world.cache.inspect, name), parameters)


def of_sequence(name: str, **parameters: Parameter) -> tuple[str, Call]:
    return f"Sequence.{name}", Call(lambda world: getattr(world.running, name), parameters)


def of_plan(name: str, **parameters: Parameter) -> tuple[str, Call]:
    return f"Plan.{name}", Call(lambda world: getattr(world.plan, name), parameters)


INT, MAYBE_INT = constant(1, "int"), constant(None, "int none")
NUMBER = constant(0, "int number")
FLAG = constant(False, "flag")
TEXT = constant(None, "text none")
TOKENS = constant([1, 2, 3, 4, 5], "tokens")
KEYS = constant([(0, 1, b"key")], "empty")
PROMPT = constant([1, 2, 3, 4, 5], "tokens empty")
NAMES: dict[str, Parameter] = {"salt": TEXT, "lora": TEXT, "extra_keys": KEYS}
RUNNING = of_world("running")
BATCH = Parameter(lambda world: [world.running, world.filling, world.growing])
STEP_TOKENS = constant([1, 2, 3])

IDENTITY = BlockIdentity(b"", b"", bytes(16))

CALLS: dict[str, Call] = dict(
    [
        (
            "KVCacheManager",
            Call(
                lambda _: KVCacheManager,
                {
                    "num_blocks": INT,
                    "block_size": MAYBE_INT,
                    "first_block_id": INT,
                    "groups": constant(None, "none"),
                    "hash_algorithm": constant("sha256"),
                    "enable_caching": FLAG,
                    "enable_events": FLAG,
                    "num_history_blocks": INT,
                    "pin_budget": constant(0.5, "int number"),
                    "tiers": constant([], "empty"),
                    "eviction": constant("slru", "none callable"),
                    "debug": FLAG,
                },
            ),
        ),
        of_manager("get_computed_blocks", sequence=of_world("waiting"), max_tokens=MAYBE_INT),
        of_manager(
            "allocate_slots",
            sequence=of_world("waiting"),
            num_new_tokens=MAYBE_INT,
            hit=of_world("hit", "none"),
            num_external_computed_tokens=constant(0, "int"),
            num_total_tokens=constant(None, "none int"),
            num_in_flight_tokens=INT,
            delay_cache_blocks=FLAG,
        ),
        (
            "KVCacheManager.allocate_slots of a total",
            Call(
                lambda world: lambda total: world.manager.allocate_slots(world.waiting, num_total_tokens=total),
                {"total": MAYBE_INT},
            ),
        ),
        of_manager(
            "get_num_blocks_to_allocate",
            sequence=of_world("waiting"),
            num_total_tokens=INT,
            hit=of_world("hit", "none"),
        ),
        of_manager("append_slots", sequence=RUNNING, token_ids=TOKENS, delay_cache_blocks=FLAG),
        of_manager("append_step", sequences=BATCH, token_ids=STEP_TOKENS, delay_cache_blocks=FLAG),
        of_manager("cache_blocks", sequence=RUNNING, num_computed_tokens=INT),
        of_manager("free", sequence=RUNNING),
        of_manager("abort", sequence=RUNNING, num_computed_tokens=INT),
        of_manager("fork", sequence=RUNNING, sequence_id=constant("child", "id")),
        of_manager(
            "truncate", sequence=RUNNING, num_tokens=constant(6, "int"), num_computed_tokens=constant(None, "none")
        ),
        of_manager("rewind", sequence=RUNNING, num_tokens=INT),
        of_manager("renew", sequence=of_world("old")),
        of_inspect("count_empty_blocks", max_blocks=INT),
        of_manager("evict_blocks", block_ids=constant([1], "ints empty")),
        of_manager("forget_salt", salt=constant("mine", "text none")),
        of_inspect("block_hashes", sequence=of_world("waiting", "sequence")),
        of_inspect("leaks", min_age=INT),
        of_inspect("watch_evictions", group_of=constant(str, "callable uncalled")),
        of_inspect("find_block", digest=constant(b"", "bytes")),
        of_manager("sequence", sequence_id=constant("running", "id")),
        of_holds("read", sequence=RUNNING, num_tokens=MAYBE_INT),
        of_holds("write", sequence=RUNNING, num_tokens=MAYBE_INT),
        of_holds("detach", sequence=RUNNING),
        of_holds("release", hold=of_world("held")),
        (
            "Tier",
            Call(
                lambda _: Tier,
                {
                    "name": constant("host", "text"),
                    "num_blocks": INT,
                    "num_block_bytes": INT,
                    "store": constant("reused"),
                    "min_store_tokens": MAYBE_INT,
                    "window_store_tokens": MAYBE_INT,
                    "bytes_per_second": constant(None, "int number none"),
                    "max_transfer_blocks": INT,
                    "is_persistent": FLAG,
                    "is_shared": constant(False, "flag"),
                    "medium": TEXT,
                },
            ),
        ),
        (
            "Tier.check_groups",
            Call(lambda _: Tier.check_groups, {"groups": constant([FullAttention(4)], "empty")}),
        ),
        (
            "BlockIdentity",
            Call(
                lambda _: BlockIdentity,
                {**{name: constant(b"", "bytes") for name in ("parent", "extra_keys", "tokens")}, "column": INT},
            ),
        ),
        (
            "BlockIdentity.of_parts",
            Call(
                lambda _: BlockIdentity.of_parts,
                {name: constant(b"", "bytes") for name in ("parent", "extra_keys", "tokens")},
            ),
        ),
        of_states("next_cut", sequence=of_world("recurrent", "sequence"), max_end=INT, hit=constant(None, "none")),
        of_states("mark", sequence=of_world("recurrent", "sequence"), position=INT),
        of_sessions("pause", session=constant("chat", "id"), reason=constant("tool_use", "text"), salt=TEXT),
        of_sessions("end", session=constant("chat", "id"), salt=TEXT),
        of_tiers("find", hit=of_world("tier_hit")),
        of_tiers(
            "allocate",
            sequence=of_world("below"),
            hit=of_world("tier_hit", "none"),
            loads=of_world("loads", "empty"),
            num_new_tokens=MAYBE_INT,
        ),
        of_tiers("worth_loading", loads=of_world("loads", "empty")),
        of_tiers("note_computed", num_tokens=INT, seconds=constant(1.5, "int number")),
        of_tiers("complete", transfer=of_world("transfer"), ok=FLAG, seconds=constant(None, "int number none")),
        of_tiers("give_up", sequence=of_world("loading")),
        of_tiers("is_loading", sequence=of_world("below", "sequence")),
        of_tiers("set_quota", tier=constant("host"), salt=TEXT, max_blocks=MAYBE_INT),
        of_tiers("set_default_quota", tier=constant("disk"), max_blocks=MAYBE_INT),
        of_tiers("quota_of", tier=constant("host"), salt=TEXT),
        of_tiers("quotas", tier=constant("host")),
        of_tiers("empty_slots", tier=constant("disk")),
        of_tiers("restore", tier=constant("disk"), slots=constant([(3, IDENTITY)], "empty")),
        (
            "Tiers.note_found",
            Call(
                lambda world: world.sharing.tiers.note_found,
                {
                    "tier": constant("shared"),
                    "sequence": of_world("below", "sequence"),
                    "num_blocks": INT,
                    "attached": constant([(0, 1)], "empty"),
                },
            ),
        ),
        ("BlockHold.group_block_ids", Call(lambda world: world.held.group_block_ids, {"group": constant(0, "int")})),
        of_inspect(
            "shared_prefixes",
            sequences=Parameter(lambda world: [world.running, world.filling], "empty"),
            min_blocks=INT,
            num_visible_tokens=constant([1, 2], "ints none"),
        ),
        of_inspect("to_dot", max_nodes=MAYBE_INT),
        of_pins(
            "pin",
            token_ids=TOKENS,
            **NAMES,
            priority=constant(50, "int"),
            expires_at=constant(None, "int number none"),
        ),
        of_pins("unpin", pin=of_world("pin")),
        of_pins("expire", now=constant(5.0, "int number")),
        of_quotas("set", salt=TEXT, max_blocks=MAYBE_INT),
        of_quotas("set_default", max_blocks=MAYBE_INT),
        of_quotas("of", salt=TEXT),
        of_inspect("explain", sequence=of_world("waiting", "sequence")),
        (
            "Sequence",
            Call(
                lambda _: Sequence,
                {
                    "sequence_id": constant("s", "id"),
                    "prompt_token_ids": TOKENS,
                    **NAMES,
                    "session": constant("chat", "id none"),
                    "copy": FLAG,
                },
            ),
        ),
        of_sequence("group_block_ids", group=constant(0, "int")),
        of_sequence("group_blocks", group=constant(0, "int")),
        of_sequence("first_live_block", group=constant(0, "int")),
        of_sequence("token_ids", start=INT, end=MAYBE_INT),
        of_sequence("append_tokens", token_ids=TOKENS, extra_keys=constant([], "empty")),
        of_sequence("fork", sequence_id=constant("child", "id")),
        ("CacheHit.cut", Call(lambda world: world.hit.cut, {"max_tokens": INT})),
        ("CacheHit.group_blocks", Call(lambda world: world.hit.group_blocks, {"group": constant(0, "int")})),
        (
            "PrefixCache",
            Call(
                lambda _: PrefixCache,
                {
                    "max_blocks": INT,
                    "block_size": INT,
                    "max_bytes": constant(None, "none"),
                    "eviction": constant("s3fifo", "none callable"),
                    "pin_budget": constant(0.5, "int number"),
                    "hash_algorithm": constant("sha256"),
                    "enable_events": FLAG,
                    "num_history_blocks": INT,
                },
            ),
        ),
        ("PrefixCache.now", Call(lambda world: lambda now: setattr(world.cache, "now", now), {"now": NUMBER})),
        ("KVCacheManager.now", Call(lambda world: lambda now: setattr(world.manager, "now", now), {"now": NUMBER})),
        of_cache("match_prefix", token_ids=PROMPT, **NAMES),
        of_cache("query_match_len", token_ids=PROMPT, **NAMES),
        of_cache(
            "insert_prefix",
            token_ids=PROMPT,
            kv_block_ids=constant([7], "ints"),
            num_cached_tokens=constant(0, "int"),
            block_bytes=constant(0, "int"),
            payloads=constant([(5, "any", 0)], "empty"),
            pin=FLAG,
            **NAMES,
        ),
        of_cache("attach", token_ids=PROMPT, payload=constant("any", "any"), num_bytes=constant(0, "int"), **NAMES),
        of_cache("evict", num_blocks=INT, num_bytes=constant(0, "int")),
        of_cache("pin_prefix", token_ids=PROMPT, description=TEXT, **NAMES),
        of_cache("unpin_prefix", token_ids=PROMPT, **NAMES),
        of_inspected("contains_block", kv_block_id=INT),
        of_inspected("block_hashes", token_ids=PROMPT, **NAMES),
        of_inspected("find_block", digest=constant(b"", "bytes")),
        of_inspected("explain", token_ids=PROMPT, **NAMES),
        of_inspected("to_dot", max_nodes=MAYBE_INT),
        (
            "CacheMetrics",
            Call(
                lambda _: CacheMetrics,
                {
                    "manager": of_world("other"),
                    "sample_every": MAYBE_INT,
                    "clock": constant(None, "callable none"),
                    "window": INT,
                    "bounds": constant(None, "ints numbers none"),
                },
            ),
        ),
        (
            "kind_of_layers",
            Call(lambda _: kind_of_layers, {"block_size": INT, "window": MAYBE_INT, "chunk_size": MAYBE_INT}),
        ),
        ("FullAttention", Call(lambda _: FullAttention, {"block_size": INT})),
        (
            "FullAttention.num_blocks",
            Call(lambda _: FullAttention(4).num_blocks, {"num_tokens": INT, "num_step_tokens": INT}),
        ),
        (
            "SlidingWindow",
            Call(lambda _: SlidingWindow, {"block_size": INT, "window": INT, "is_cached": FLAG, "keeps_passed": FLAG}),
        ),
        (
            "ChunkedLocal",
            Call(
                lambda _: ChunkedLocal, {"block_size": INT, "chunk_size": INT, "is_cached": FLAG, "keeps_passed": FLAG}
            ),
        ),
        (
            "ChunkedLocal.num_blocks",
            Call(lambda _: ChunkedLocal(4, 9).num_blocks, {"num_tokens": INT, "num_step_tokens": INT}),
        ),
        (
            "SlidingWindow.num_blocks",
            Call(lambda _: SlidingWindow(4, 9).num_blocks, {"num_tokens": INT, "num_step_tokens": INT}),
        ),
        (
            "RecurrentState",
            Call(
                lambda _: RecurrentState,
                {"block_size": INT, "num_slots": INT, "num_blocks": INT, "every": MAYBE_INT, "num_kept": INT},
            ),
        ),
        (
            "Scratch.num_blocks",
            Call(lambda _: Scratch().num_blocks, {"num_tokens": INT, "num_step_tokens": INT}),
        ),
        ("StateInPlace", Call(lambda _: StateInPlace, {"block_size": INT})),
        (
            "StateInPlace.num_blocks",
            Call(lambda _: StateInPlace(4).num_blocks, {"num_tokens": INT, "num_step_tokens": INT}),
        ),
        (
            "RecurrentState.num_blocks",
            Call(lambda _: RecurrentState(4, 2).num_blocks, {"num_tokens": INT, "num_step_tokens": INT}),
        ),
        (
            "plan",
            Call(
                lambda _: plan,
                {
                    "kinds": constant([FullAttention(16)]),
                    "layers": constant([KVLayer(0, 1, 64)]),
                    "dtype": constant(1, "int"),
                    "num_bytes": constant(2**20, "int"),
                    "max_padding": constant(0.5, "int number"),
                    "states": constant([], "empty"),
                },
            ),
        ),
        of_plan("blocks_of_sequence", num_tokens=INT, num_step_tokens=INT),
        of_plan("num_sequences", num_tokens=INT, num_step_tokens=INT),
        of_plan("table", contexts=constant([1], "ints empty"), num_step_tokens=INT),
        ("hashing.decode_extra_keys", Call(lambda _: decode_extra_keys, {"encoded": constant(b"", "nothing")})),
    ]
)
CASES = [(name, parameter) for name, call in CALLS.items() for parameter in call.parameters]
BLOCKS = {
    name
    for name, call in CALLS.items()
    if name.startswith(("KVCacheManager", "Manager", "Inspector", "Sequence", "CacheHit", "BlockHold"))
}


def takes_of(name: str, parameter: str) -> set[str]:
    return set(CALLS[name].parameters[parameter].takes.split())


def worlds_of(name: str) -> list[str]:
    return WORLDS if name in BLOCKS else ["plain"]


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_an_odd_value_is_taken_for_what_it_is_or_refused(name: str, parameter: str) -> None:
    call = CALLS[name]
    takes = takes_of(name, parameter)
    for kind in worlds_of(name):
        world, problems = World(kind), []
        before = world.state()
        for odd, (make, kinds) in ODD.items():
            arguments = {other: entry.good(world) for other, entry in call.parameters.items()}
            arguments[parameter] = make()
            outcome = outcome_of(call.target(world), arguments)
            if outcome == "succeeded":
                if not (kinds & takes or "any" in takes):
                    problems.append(f"{odd}: was taken")
                check_after(world, odd, kind, problems)
                world = World(kind)
                before = world.state()
                continue
            if outcome is not None:
                problems.append(f"{odd}: {outcome}")
            check_after(world, odd, kind, problems)
            if world.state() != before:
                problems.append(f"{odd}: the call raised, and changed something")
                world = World(kind)
                before = world.state()
        assert not problems, f"{name}({parameter}), {kind}:\n" + "\n".join(problems)


def check_after(world: World, odd: str, kind: str, problems: list[str]) -> None:
    try:
        world.check()
    except AssertionError as error:
        problems.append(f"{odd}: left {kind} broken: {error}")


def outcome_of(target: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    """What is wrong with how the call ended: None if nothing is, "succeeded" if it did."""
    try:
        target(**arguments)
    except Mine:
        return None
    except KVBlocksError as error:
        return None if "expected" in str(error) else f"doesn't say what was expected: {error}"
    except BaseException as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "succeeded"


@pytest.mark.parametrize("name", CALLS)
def test_the_table_s_own_arguments_succeed(name: str) -> None:
    """Otherwise a call with an odd value would be refused because of another argument."""
    for kind in worlds_of(name):
        world = World(kind)
        call = CALLS[name]
        outcome = outcome_of(call.target(world), {other: entry.good(world) for other, entry in call.parameters.items()})
        assert outcome == "succeeded", f"{kind}: {outcome}"


@pytest.mark.parametrize(("name", "parameter"), [case for case in CASES if "int" in takes_of(*case)])
def test_an_int_may_be_of_any_kind_that_has_an_index(name: str, parameter: str) -> None:
    numpy = pytest.importorskip("numpy", reason="numpy comes with the engine's dependencies")
    call = CALLS[name]
    for make in (numpy.int64, numpy.uint32, Index):
        world = World("plain")
        arguments = {other: entry.good(world) for other, entry in call.parameters.items()}
        number = arguments[parameter]
        arguments[parameter] = make(number if type(number) is int else 1)
        assert outcome_of(call.target(world), arguments) == "succeeded", make


# What the table leaves out: the name, and what its docstring says of it.
EXEMPT = {
    "BlockPool": "check no types",
    "CacheView": "What a policy may ask",
    "EvictionPolicy": "Says which of the free cached blocks is evicted next",
    "FreeBlockQueue": "checks no types",
    "PrefixCacheProtocol": "implementations of your own and stand-ins",
    "CacheHit.__init__": "Made by `get_computed_blocks`",
    "BlockHold.__init__": "Made by `BlockHolds`",
    "BlockHolds.__init__": "Made by a manager",
    "KVCacheBlock.__init__": "Made by a pool",
    "Loaded.__init__": "Made by `manager.tiers`",
    "TierHit.__init__": "Made by `manager.tiers.find`",
    "HeldBlocks.__init__": "one item of `Inspector.leaks`",
    "CacheInspector.__init__": "Made by a cache",
    "Inspector.__init__": "Made by a manager",
    "ManagerPins.__init__": "Made by a manager",
    "ManagerQuotas.__init__": "Made by a manager",
    "ManagerStates.__init__": "Made by a manager",
    "Sessions.__init__": "Made by a manager",
    "Tiers.__init__": "Made by a manager",
    "Transfer.__init__": "Made by `manager.tiers`",
    "Pin.__init__": "Made by `manager.pins.pin`",
    "PrefixMatch.__init__": "Made by a `PrefixCache`",
    "PrefixMatch.show": "Only for the cache",
    "PrefixMatch.renew": "Only for the cache",
    "PrefixMatch.is_still": "Only for the cache",
    "Sequence.append_checked": "Only for the manager",
    "Sequence.append_packed": "Only for the manager",
    "Sequence.truncate_tokens": "Only for the manager",
    "Sequence.lose": "Only for the manager",
    "Sequence.settle": "Only for the manager",
    "Sequence.num_written_after": "Only for the manager",
    "Sequence.unwritten": "Only for the manager",
    "Sequence.truncate_blocks": "Only for the manager",
    "Sequence.replace_block": "Only for the manager",
    "Sequence.encoded_keys": "Only for the manager",
    "Sequence.check": "Only for the manager",
    "Sequence.describe_for": "Only for the manager",
}
KINDS = (ChunkedLocal, FullAttention, RecurrentState, Scratch, SlidingWindow, StateInPlace)
EXEMPT |= {"Group": "the base class of all kinds"}
for _kind in KINDS:
    EXEMPT |= {
        f"{_kind.__name__}.{method}": "Only for the manager"
        for method in ("first_seen", "first_needed", "needed_blocks")
    }
    EXEMPT[f"{_kind.__name__}.layer_bytes"] = "Only for `plan`"
RECORDS = "check nothing"
"""What `kvblocks.__doc__` says of records that calls return: their classes take anything."""


def public_calls() -> dict[str, Any]:
    """All that can be called, by its name in the table: functions, classes and their own public methods."""
    found: dict[str, Any] = {}
    for name in kvblocks.__all__:
        value = getattr(kvblocks, name)
        if isinstance(value, type) and not issubclass(value, Exception):
            found[f"{name}.__init__"] = value
            for base in value.__mro__:
                if base.__module__.startswith("kvblocks"):
                    found |= {f"{name}.{key}": item for key, item in vars(base).items() if is_method(key, item)}
        elif inspect.isroutine(value):  # no type alias, such as PolicyFactory
            found[name] = value
    return {name: item for name, item in found.items() if name.split(".")[0] not in EXEMPT}


def is_method(name: str, item: Any) -> bool:
    return callable(item) and not name.startswith("_") and not isinstance(item, type)


def is_record(value: type) -> bool:
    """Whether it is a NamedTuple or a dataclass that calls answer with; the three that callers make aren't."""
    made = issubclass(value, tuple) or hasattr(value, "__dataclass_fields__")
    return made and value not in KINDS


def parameters_of(name: str, item: Any) -> set[str]:
    """Its parameters. Of NamedTuples' generated methods, none."""
    if name.rpartition(".")[2] in ("count", "index"):
        return set()
    return {parameter for parameter in inspect.signature(item).parameters if parameter != "self"}


@pytest.mark.skipif(kvblocks.__compiled__, reason="compiled functions have no signatures; the plain build has the same")
def test_the_table_is_complete() -> None:
    missing = []
    for name, item in public_calls().items():
        is_made = name.endswith(".__init__")
        parameters = parameters_of(name, item)
        if name in EXEMPT or not parameters or (is_made and is_record(item)):
            continue
        call = CALLS.get(name.removesuffix(".__init__"))
        if call is None or parameters != set(call.parameters):
            missing.append(f"{name}: {sorted(parameters)}")
    assert not missing, "not in CALLS:\n" + "\n".join(missing)


@pytest.mark.skipif(kvblocks.__compiled__, reason="compiled code has no docstrings; the plain build has the same")
def test_what_is_left_out_says_so() -> None:
    assert RECORDS in (kvblocks.__doc__ or "")
    for name, phrase in EXEMPT.items():
        owner, _, method = name.partition(".")
        value = getattr(kvblocks, owner)
        document = inspect.getdoc(value if method in ("", "__init__") else getattr(value, method)) or ""
        assert phrase in " ".join(document.split()), f"{name}: {document}"


def test_a_salt_from_an_enum_is_its_text() -> None:
    manager = KVCacheManager(16, 4)
    first = Sequence("first", range(9), salt=Text.ABC)
    assert (first.salt, type(first.salt)) == ("abc", str)
    manager.allocate_slots(first)
    assert manager.get_computed_blocks(Sequence("second", range(9), salt="abc")).num_tokens == 8
    assert manager.get_computed_blocks(Sequence("third", range(9), salt="Text.ABC")).num_tokens == 0


def test_arrays_as_extra_keys() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy comes with the engine's dependencies")
    keys = numpy.array([(0, 1, "key")], dtype=object)
    with pytest.raises(InvalidArgumentError, match=r"extra_keys: expected \(start, end, key\), got"):
        Sequence("s", [1, 2], extra_keys=keys)
    assert Sequence("s", [1, 2], extra_keys=[(numpy.int64(0), numpy.int64(1), "key")]).extra_keys == ((0, 1, "key"),)
    assert Sequence("s", [1, 2], extra_keys=numpy.array([])).extra_keys == ()


@pytest.mark.parametrize("answers", [0, 1, 2, 3])
@pytest.mark.parametrize("num_tokens", [5, 7, 8])
@pytest.mark.parametrize("error", [Mine, TypeError, ValueError])
def test_an_index_that_raises_at_some_time_changes_nothing(
    answers: int, num_tokens: int, error: type[Exception]
) -> None:
    """Inside a block, where one is filled and where one begins; one call a token, and a step."""
    for append in ("append_slots", "append_step"):
        manager = KVCacheManager(16, 4)
        one, other = Sequence("one", range(num_tokens)), Sequence("other", range(20, 20 + num_tokens))
        manager.allocate_slots(one)
        manager.allocate_slots(other)
        bad = Index(7, answers, error)
        before = (one.token_ids(), list(one.block_ids), other.token_ids(), list(other.block_ids), manager.stats)
        try:
            if append == "append_slots":
                manager.append_slots(one, [bad])
            else:
                manager.append_step([other, one], [3, bad])
        except (Mine, KVBlocksError):
            assert before == (
                *(one.token_ids(), list(one.block_ids), other.token_ids(), list(other.block_ids), manager.stats),
            )
        else:
            assert one.token_ids()[-1] == 7
        assert one.num_computed_tokens == one.num_tokens
        manager.check()


def test_groups_of_numpy_sizes_are_equal_to_those_of_ints() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy comes with the engine's dependencies")
    assert FullAttention(numpy.int64(16)) == FullAttention(16)
    assert type(SlidingWindow(numpy.int64(16), numpy.int32(9)).window) is int
    manager = KVCacheManager(8, groups=[FullAttention(numpy.int64(4)), SlidingWindow(numpy.int64(4), numpy.int64(6))])
    sequence = Sequence(numpy.int64(3), range(9))
    hit = manager.get_computed_blocks(sequence)
    assert hit.group_blocks(numpy.int64(1)) == []
    assert manager.allocate_slots(sequence, hit=hit) is not None
    manager.check()


def test_an_id_that_is_not_equal_to_itself_is_refused() -> None:
    manager = KVCacheManager(16, 4, debug=True)
    sequence = Sequence("s", range(6))
    manager.allocate_slots(sequence)
    for refused in (float("nan"), [], memoryview(bytearray(1))):
        with pytest.raises(InvalidArgumentError, match="sequence_id: expected something"):
            manager.fork(sequence, refused)
    manager.fork(sequence, (1, "two"))
