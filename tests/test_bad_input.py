"""Bad input: every public call, every parameter, every odd value, alike in both builds.

`CALLS` is the table. A call with an odd value either succeeds, where the value is what the parameter takes, or raises a
KVBlocksError that says what was expected, or lets out what the caller's own code raised; and unless it succeeded,
nothing has changed. `test_the_table_is_complete` finds a public call or parameter that the table lacks.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from odd_values import ODD, Index, Mine, Text

import kvblocks
from kvblocks import (
    CacheMetrics,
    FullAttention,
    InvalidArgumentError,
    KVBlocksError,
    KVCacheManager,
    KVLayer,
    PrefixCache,
    Sequence,
    SlidingWindow,
    plan,
)
from kvblocks.hashing import decode_extra_keys

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
        self.pin = manager.pin(range(100, 108))
        manager.set_quota("mine", 3)
        self.other = KVCacheManager(8, 4)
        self.sampled = KVCacheManager(8, 4)
        self.sampler = self.sampled.start_sampling(1, lambda: 0.0, (1.0,))
        self.cache = PrefixCache(4, 4)
        self.cache.insert_prefix(range(8), [0, 1], pin=True)
        self.cache.insert_prefix(range(50, 54), [2])
        self.plan = plan([FullAttention(16)], [KVLayer(0, 1, 64)], "float16", 2**20)
        self.sequences = [self.old, self.waiting, self.idle, self.running, self.filling, self.growing, self.chunked]

    def _start(self, name: str, tokens: Any) -> Sequence:
        sequence = Sequence(name, tokens)
        assert self.manager.allocate_slots(sequence) is not None
        return sequence

    def check(self) -> None:
        for manager in (self.manager, self.other, self.sampled):
            manager.check()
        self.cache.check()

    def state(self) -> list[Any]:
        """All that can be seen of it."""
        manager, cache = self.manager, self.cache
        seen: list[Any] = [self.hit.num_tokens, self.hit.pending_tokens, manager.group_usage(), manager.prefix_rows()]
        for each in (manager, self.other, self.sampled):
            seen += [each.stats, each.free_block_ids(), each.quotas(), each.last_refusal]
            seen += [(id(pin), pin.num_held_blocks, pin.expires_at) for pin in each.pins]
        for one in self.sequences:
            seen += [one.token_ids(), one.num_computed_tokens, one.num_readonly_tokens, one.is_allocated]
            seen += [list(one.block_ids), one.sequence_id, one.salt, one.lora, one.extra_keys]
        seen += [
            cache.cached_block_count(),
            cache.evictable_count(),
            cache.get_hit_rate(),
            cache.get_avg_match_length(),
        ]
        return [*seen, cache.list_pinned(), [block for block in range(100) if cache.contains_block(block)]]


class Parameter(NamedTuple):
    """good: of a world, a value that the call takes. takes: the kinds of odd values that it may take."""

    good: Callable[[World], Any]
    takes: str = ""
    spared: tuple[str, ...] = ()
    """Odd values that are left out, because they are taken and cost too much."""


class Call(NamedTuple):
    target: Callable[[World], Callable[..., Any]]
    parameters: dict[str, Parameter]


def constant(value: Any, takes: str = "", spared: tuple[str, ...] = ()) -> Parameter:
    return Parameter(lambda _: value, takes, spared)


def of_world(name: str, takes: str = "") -> Parameter:
    return Parameter(lambda world: getattr(world, name), takes)


def of_manager(name: str, **parameters: Parameter) -> tuple[str, Call]:
    return f"KVCacheManager.{name}", Call(lambda world: getattr(world.manager, name), parameters)


def of_cache(name: str, **parameters: Parameter) -> tuple[str, Call]:
    return f"PrefixCache.{name}", Call(lambda world: getattr(world.cache, name), parameters)


def of_sequence(name: str, **parameters: Parameter) -> tuple[str, Call]:
    return f"Sequence.{name}", Call(lambda world: getattr(world.running, name), parameters)


def of_plan(name: str, **parameters: Parameter) -> tuple[str, Call]:
    return f"Plan.{name}", Call(lambda world: getattr(world.plan, name), parameters)


INT, MAYBE_INT = constant(1, "int"), constant(None, "int none")
FLAG = constant(False, "flag")
TEXT = constant(None, "text none")
TOKENS = constant([1, 2, 3, 4, 5], "tokens")
KEYS = constant([(0, 1, b"key")], "empty")
NAMES: dict[str, Parameter] = {"salt": TEXT, "lora": TEXT, "extra_keys": KEYS}
RUNNING = of_world("running")
BATCH = Parameter(lambda world: [world.running, world.filling, world.growing])
STEP_TOKENS = constant([1, 2, 3])
HUGE = ("2**63", "a huge int")

CALLS: dict[str, Call] = dict(
    [
        (
            "KVCacheManager",
            Call(
                lambda _: KVCacheManager,
                {
                    "num_blocks": INT,
                    "block_size": MAYBE_INT,
                    "groups": constant(None, "none"),
                    "hash_algorithm": constant("sha256"),
                    "enable_caching": FLAG,
                    "enable_events": FLAG,
                    "num_history_blocks": INT,
                    "pin_budget": constant(0.5, "int number"),
                    "debug": FLAG,
                },
            ),
        ),
        of_manager("get_computed_blocks", sequence=of_world("waiting")),
        of_manager(
            "allocate_slots",
            sequence=of_world("waiting"),
            num_new_tokens=MAYBE_INT,
            hit=of_world("hit", "none"),
            num_lookahead_tokens=INT,
        ),
        of_manager("append_slots", sequence=RUNNING, token_ids=TOKENS),
        of_manager("append_step", sequences=BATCH, token_ids=STEP_TOKENS),
        of_manager("append_group_step", sequences=BATCH, token_ids=STEP_TOKENS),
        of_manager("reserve_slots", sequence=RUNNING, num_tokens=INT),
        of_manager("free", sequence=RUNNING),
        of_manager("abort", sequence=RUNNING, num_computed_tokens=INT),
        of_manager("fork", sequence=RUNNING, sequence_id=constant("twin", "id")),
        of_manager(
            "truncate", sequence=RUNNING, num_tokens=constant(6, "int"), num_computed_tokens=constant(None, "none")
        ),
        of_manager("renew", sequence=of_world("old")),
        of_manager(
            "shared_prefixes",
            sequences=Parameter(lambda world: [world.running, world.filling], "empty"),
            min_blocks=INT,
            num_visible_tokens=constant([1, 2], "ints none"),
        ),
        of_manager("to_dot", max_nodes=MAYBE_INT),
        of_manager(
            "pin",
            token_ids=TOKENS,
            **NAMES,
            priority=constant(50, "int"),
            expires_at=constant(None, "int number none"),
        ),
        of_manager("unpin", pin=of_world("pin")),
        of_manager("expire_pins", now=constant(5.0, "int number")),
        of_manager("set_quota", salt=TEXT, max_blocks=MAYBE_INT),
        of_manager("set_default_quota", max_blocks=MAYBE_INT),
        of_manager("explain", sequence=of_world("waiting", "sequence")),
        (
            "KVCacheManager.start_sampling",
            Call(
                lambda world: world.other.start_sampling,
                {
                    "every": INT,
                    "now": constant(lambda: 0.0, "callable"),
                    "bounds": constant([1, 2.5], "numbers ints"),
                },
            ),
        ),
        (
            "KVCacheManager.stop_sampling",
            Call(lambda world: world.sampled.stop_sampling, {"sampler": of_world("sampler")}),
        ),
        (
            "Sequence",
            Call(lambda _: Sequence, {"sequence_id": constant("s", "id"), "prompt_token_ids": TOKENS, **NAMES}),
        ),
        of_sequence("group_block_ids", group=constant(0, "int")),
        of_sequence("group_blocks", group=constant(0, "int")),
        of_sequence("first_live_block", group=constant(0, "int")),
        of_sequence("token_ids", start=INT, end=MAYBE_INT),
        of_sequence("append_tokens", token_ids=TOKENS),
        of_sequence("append_token", token_id=constant(1, "int flag")),
        of_sequence("fork", sequence_id=constant("twin", "id")),
        ("CacheHit.group_blocks", Call(lambda world: world.hit.group_blocks, {"group": constant(0, "int")})),
        ("PrefixCache", Call(lambda _: PrefixCache, {"max_blocks": INT, "block_size": INT})),
        of_cache("match_prefix", token_ids=TOKENS, **NAMES),
        of_cache(
            "match_many",
            prompts=constant([[1, 2, 3], [4]], "prompts empty"),
            salt=TEXT,
            lora=TEXT,
            extra_keys=constant([[], [(0, 1, "key")]], "empty empties"),
        ),
        of_cache("query_match_len", token_ids=TOKENS, **NAMES),
        of_cache("insert_prefix", token_ids=TOKENS, kv_block_ids=constant([7], "ints"), pin=FLAG, **NAMES),
        of_cache("attach", token_ids=TOKENS, payload=constant("any", "any"), **NAMES),
        of_cache("evict_lru", num_blocks=INT),
        of_cache("pin_prefix", token_ids=TOKENS, description=TEXT, **NAMES),
        of_cache("unpin_prefix", token_ids=TOKENS, **NAMES),
        of_cache("contains_block", kv_block_id=INT),
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
        ("FullAttention", Call(lambda _: FullAttention, {"block_size": INT})),
        (
            "FullAttention.num_blocks",
            Call(lambda _: FullAttention(4).num_blocks, {"num_tokens": INT, "num_step_tokens": INT}),
        ),
        ("SlidingWindow", Call(lambda _: SlidingWindow, {"block_size": INT, "window": INT})),
        (
            "SlidingWindow.num_blocks",
            Call(lambda _: SlidingWindow(4, 9).num_blocks, {"num_tokens": INT, "num_step_tokens": INT}),
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
BLOCKS = {name for name, call in CALLS.items() if name.startswith(("KVCacheManager", "Sequence", "CacheHit"))}


def worlds_of(name: str) -> list[str]:
    return WORLDS if name in BLOCKS else ["plain"]


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_an_odd_value_is_taken_for_what_it_is_or_refused(name: str, parameter: str) -> None:
    call = CALLS[name]
    takes = set(call.parameters[parameter].takes.split())
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
