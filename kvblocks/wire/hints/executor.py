"""KV hints: an orchestrator's requests about prefixes, carried out on a manager's pins and tiers, and answered.

The envelope is that of vLLM and Dynamo (`envelope`). The payloads of `pin`, `release`, `expire`, `prefetch` and
`retain` are this project's, since the projects have agreed on none. docs/wire-hints.md shows them.

A hint is not binding, and no request of a user ever waits for one. Pins of hints have a priority below 100, so they
give up blocks before a call is refused. Loads hold at most a share of the pool, and leave a share of it free. Each
caller is one tenant. It can name only prefixes of its own salt, within its own budget. Any other name gets the same
answer as a name that doesn't exist. So no sequence of hints locks the pool, or touches what another tenant has.

Sans-IO: no clock, no thread. Times are the caller's, and waiting actions continue in `step`. Invariants:

- A tenant's pins are for at most as many blocks as its budget allows.
- A tenant has at most max_pins pins, max_deferred prefetches (waiting or loading) and max_remembered kept answers.
- A deferred action gets exactly one more answer, unless the executor is closed first.

A call that an interrupt ends (KeyboardInterrupt) may leave a pin or a loading sequence that only the manager knows.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from math import inf
from sys import float_info
from typing import Any, SupportsFloat, SupportsIndex

from kvblocks import KVCacheManager, Pin
from kvblocks.arguments import Text, check_count, check_name, check_number, is_a, wrong
from kvblocks.errors import InvalidArgumentError, KVBlocksError, PinBudgetError
from kvblocks.wire.hints.book import Book, Standing, StandingPin, StandingPrefetch, fingerprint, without_payload
from kvblocks.wire.hints.envelope import ACTION_VERSION, HintAction, HintAnswer, HintAnswers, Outcome, parse_envelope
from kvblocks.wire.hints.limits import HintLimits, HintStats
from kvblocks.wire.hints.prefetch import Begun, Prefetches
from kvblocks.wire.hints.prefix import NAMING_FIELDS, NamedPrefix, PrefixNames, UnknownPrefixError

PIN_PRIORITY = 50
"""The priority of a pin if its hint names none."""

_MOST_CHARACTERS = 1000  # of a reason, which is kept with its answer
_IDS = frozenset({"pin_id", "action_id", "message_id"})
_MOST_SECONDS = float_info.max  # an int may be larger
_UNKNOWN = "nothing by this name is known here"

Said = tuple[Outcome, str | None, Mapping[str, int | float | str]]
"""An answer: the outcome, the reason, and numbers."""


class HintExecutor:
    """Carries out hints on `manager`. Other code may go on using the manager, on the same thread.

    max_pinned_blocks: how many blocks each tenant's pins may be for; all pins together share the manager's
    `pin_budget`. budgets: for tenants with another budget, that budget. limits: the other limits. Raises
    InvalidArgumentError.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_pinned_blocks: SupportsIndex,
        budgets: Mapping[str | None, int] | None = None,
        limits: HintLimits | None = None,
    ) -> None:
        if not is_a(manager, KVCacheManager):
            raise wrong("manager", "a KVCacheManager", manager)
        if limits is not None and not is_a(limits, HintLimits):
            raise wrong("limits", "a HintLimits or None", limits)
        self._max_pinned_blocks = check_count("max_pinned_blocks", max_pinned_blocks, 0)
        given = {} if budgets is None else dict(budgets)
        self._budgets = {check_name("budgets", name): check_count("budgets", most, 0) for name, most in given.items()}
        self._manager = manager
        self._limits = limits or HintLimits()
        self._prefetches = Prefetches(manager, self._limits)
        self._books: OrderedDict[str | None, Book] = OrderedDict()  # least recently used first
        self._later: deque[tuple[Book, str, HintAnswer]] = deque(maxlen=self._limits.max_remembered)
        self._num_answers: Counter[str] = Counter()
        self._num_repeated = self._num_dropped = 0
        self._last_refusal = manager.last_refusal
        self._is_closed = False

    @property
    def stats(self) -> HintStats:
        """Counters. O(pins and prefetches)."""
        prefetches = [standing for book in self._books.values() for standing in book.prefetches]
        return HintStats(
            num_answers=dict(self._num_answers),
            num_repeated=self._num_repeated,
            num_dropped_answers=self._num_dropped,
            num_loaded_blocks=self._prefetches.num_loaded_blocks,
            num_failed_prefetches=self._prefetches.num_failed,
            num_pins=sum([len(book.pins) for book in self._books.values()]),
            num_pinned_blocks=sum([book.num_pinned_blocks for book in self._books.values()]),
            num_waiting=sum([standing.load is None for standing in prefetches]),
            num_loading=sum([standing.load is not None for standing in prefetches]),
        )

    @property
    def next_time(self) -> float | None:
        """The latest time at which `step` must be called to end something; None: never. O(pins and prefetches)."""
        first = min([standing.ends_at for _, standing in self._standing()], default=inf)
        return None if first == inf else first

    def carry_out(self, envelope: object, tenant: Text | None, now: SupportsFloat) -> HintAnswers:
        """Carry out the actions of an envelope in their order, and return an answer to each.

        envelope: plain values, see `envelope`. tenant: the salt that the caller acts for (None: no salt). now: the time
        on the caller's clock. An action is identified by its message_id and action_id. While its answer is kept, an
        action that comes again is answered as before rather than carried out again; if its content differs, it is
        rejected.

        Raises InvalidArgumentError, with nothing done, for values that are no envelope. O(tokens named + pins and
        prefetches). If hashes are named, also O(pool), and again after each prefetch that began or ended.
        """
        self._check_open("carry_out")
        name, time = check_name("tenant", tenant), _check_time(now)
        parsed = parse_envelope(envelope, self._limits.max_actions)
        self._end_over(time)
        book = self._book_of(name)
        names = PrefixNames(self._manager, name, self._limits.max_tokens)
        answers = [
            self._refuse(action, f"expected at most {self._limits.max_tenants} tenants that have hints")
            if book is None
            else self._answer(_Asked(book, parsed.message_id, action, names, time))
            for action in parsed.actions
        ]
        return HintAnswers(name, parsed.message_id, tuple(answers))

    def step(self, now: SupportsFloat) -> list[HintAnswers]:
        """End what is over, go on with what waits, and return the answers to actions that were deferred before.

        Call it between two steps of the engine, after `tiers.complete` has reported what arrived. If the manager
        refused a call (returned None) since the last `step`, no load begins. O(pins and prefetches + blocks).
        """
        self._check_open("step")
        time = _check_time(now)
        self._prefetches.end_finished()
        for book in self._books.values():
            for prefetch in [p for p in book.prefetches if p.load is not None]:
                if prefetch.load not in self._prefetches.loads:
                    del book.prefetches[prefetch]
        self._end_over(time)
        is_short = self._manager.last_refusal is not self._last_refusal
        self._last_refusal = self._manager.last_refusal
        for book, standing in self._standing():
            if isinstance(standing, StandingPin):
                if standing.is_deferred and standing.pin.num_held_blocks >= standing.pin.num_wanted_blocks:
                    self._settle(book, standing, _accepted_pin(standing, standing.ends_at - time))
            elif not is_short and isinstance(standing, StandingPrefetch) and standing.load is None:
                begun = self._prefetches.begin(standing.prefix)
                if begun is not None:
                    self._settle(book, standing, self._go_on(book, standing, begun))
        later, self._later = [*self._later], deque(maxlen=self._later.maxlen)
        return _by_envelope(later)

    def forget(self, tenant: Text | None) -> None:
        """End and forget everything of a tenant, answers too, to delete its data; see `manager.forget_salt`.

        Its deferred actions get no answer. Raises InvalidArgumentError. O(pins and prefetches).
        """
        self._check_open("forget")
        book = self._books.pop(check_name("tenant", tenant), None)
        if book is None:
            return
        for standing in (*book.pins, *book.prefetches):
            standing.is_deferred = False
            self._end(book, standing)
        self._later = deque([later for later in self._later if later[0] is not book], self._later.maxlen)

    def close(self) -> None:
        """End all pins and loads of hints. Later hints are not carried out, and a second call does nothing."""
        if self._is_closed:
            return
        for book, standing in self._standing():
            self._end(book, standing)
        self._is_closed = True

    # One action.

    def _answer(self, asked: "_Asked") -> HintAnswer:
        """Carry out an action that is new, and remember the answer."""
        action, book = asked.action, asked.book
        if action.problem is not None:
            return self._refuse(action, action.problem)
        try:
            own_print = fingerprint(action)
        except InvalidArgumentError as error:
            return self._refuse(action, _short(error))
        kept = book.recall(asked.message_id, action.action_id)
        if kept is not None and kept[0] != own_print:
            return self._refuse(action, "expected another action_id: an action with other content has this one")
        if kept is not None:
            self._num_repeated += 1
            return kept[1]
        outcome, reason, numbers = self._carry_out(asked)
        answer = HintAnswer(without_payload(action), outcome, reason, numbers)
        self._num_answers[outcome] += 1
        book.remember(asked.message_id, own_print, answer, self._limits.max_remembered)
        return answer

    def _carry_out(self, asked: "_Asked") -> Said:
        num_changes = self._prefetches.num_changes
        try:
            return self._handler_of(asked.action)(asked)
        except UnknownPrefixError:
            return "missing", _UNKNOWN, {}
        except InvalidArgumentError as error:
            return "rejected", _short(error), {}
        finally:
            if self._prefetches.num_changes != num_changes:
                asked.names.forget_hashes()

    def _handler_of(self, action: HintAction) -> Callable[["_Asked"], Said]:
        kinds = {"pin": self._pin, "release": self._release, "expire": self._expire, "prefetch": self._prefetch}
        kind = action.action_type.removeprefix("kv.")  # Dynamo's names have this prefix
        if action.action_version != ACTION_VERSION:
            raise wrong("action_version", repr(ACTION_VERSION), action.action_version)
        if kind == "retain":
            raise InvalidArgumentError("retain: expected a manager with sessions, whose prefixes are retained")
        if kind not in kinds:
            raise wrong("action_type", f"one of {[*kinds, 'retain']}", action.action_type)
        return kinds[kind]

    def _refuse(self, action: HintAction, reason: str) -> HintAnswer:
        self._num_answers["rejected"] += 1
        return HintAnswer(without_payload(action), "rejected", reason)

    def _pin(self, asked: "_Asked") -> Said:
        payload, book = asked.payload("ttl_s", "priority", names=NAMING_FIELDS), asked.book
        seconds, priority = self._seconds(payload), payload.get("priority", PIN_PRIORITY)
        level = min(check_count("priority", priority, 0, 100), self._limits.max_priority)
        prefix = asked.names.find(payload)
        if len(book.pins) >= self._limits.max_pins:
            raise InvalidArgumentError(f"expected at most {self._limits.max_pins} pins, got one more: release some")
        pin = self._make_pin(book, prefix, level)
        if pin is None:
            raise InvalidArgumentError("expected room in the tenant's budget and that of all pins, got none")
        prefix.keep(pin.num_blocks)
        book.num_pins_made += 1
        ends_at = asked.now + seconds
        standing = StandingPin(asked.message_id, asked.action, prefix, ends_at, pin, f"hint-{book.num_pins_made}")
        book.pins[standing] = None
        _, _, numbers = _accepted_pin(standing, seconds)
        clipped = []
        if prefix.num_blocks < prefix.num_named_blocks:
            clipped.append(f"{prefix.num_blocks} of {prefix.num_named_blocks} blocks")
        if level < check_count("priority", priority, 0):
            clipped.append(f"priority {level}")
        if seconds < payload.get("ttl_s", seconds):
            clipped.append(f"{seconds:g} s")
        if clipped:
            return "clipped", f"what there is room for: {', '.join(clipped)}", numbers
        standing.is_deferred = pin.num_held_blocks < pin.num_wanted_blocks
        if standing.is_deferred:
            return "deferred", "what isn't cached yet is held once it is cached", numbers
        return "accepted", None, numbers

    def _make_pin(self, book: Book, prefix: NamedPrefix, level: int) -> Pin | None:
        """Pin as many first blocks of a prefix as budgets allow; None if they allow none."""
        manager = self._manager
        own_room = self._budgets.get(book.tenant, self._max_pinned_blocks) - book.num_pinned_blocks
        room = min(own_room, manager.pins.max_blocks - sum([pin.num_wanted_blocks for pin in manager.pins]))
        number, less = min(prefix.num_blocks, room), 1
        while number > 0:
            tokens, keys = prefix.packed(number)
            ranges = [(0, number * manager.block_size, level)]
            try:
                pin = manager.pins.pin(tokens, salt=prefix.salt, lora=prefix.lora, extra_keys=keys, priority=ranges)
            except PinBudgetError:  # a window's blocks count too
                number -= less
                less *= 2
                continue
            excess = pin.num_wanted_blocks - room
            if excess <= 0:
                return pin
            manager.pins.unpin(pin)
            number -= excess
        return None

    def _release(self, asked: "_Asked") -> Said:
        payload = asked.payload(names=NAMING_FIELDS | _IDS)
        found = self._find_standing(asked, payload)
        for standing in found:
            self._end(asked.book, standing)
        return "accepted", None, _counted(found)

    def _expire(self, asked: "_Asked") -> Said:
        payload = asked.payload("ttl_s", names=NAMING_FIELDS | _IDS)
        wanted = _check_seconds(payload.get("ttl_s", 0.0))
        seconds = min(wanted, self._limits.max_ttl_s)
        found = self._find_standing(asked, payload)
        for standing in found:
            standing.ends_at = asked.now + seconds
            if not seconds:
                self._end(asked.book, standing)
        if seconds < wanted:
            return "clipped", f"what is allowed: {seconds:g} s", {**_counted(found), "ttl_s": seconds}
        return "accepted", None, {**_counted(found), "ttl_s": seconds}

    def _prefetch(self, asked: "_Asked") -> Said:
        payload, book = asked.payload("ttl_s", names=NAMING_FIELDS | _IDS), asked.book
        seconds = self._seconds(payload)
        if _IDS & payload.keys():
            prefix = self._find_standing(asked, payload)[0].prefix
            num_wanted = prefix.num_blocks
        else:
            prefix = asked.names.find(payload)
            num_wanted = prefix.num_named_blocks
            prefix.keep(self._manager.num_blocks)
        if len(book.prefetches) >= self._limits.max_deferred:
            raise InvalidArgumentError(f"expected at most {self._limits.max_deferred} prefetches that wait or load")
        begun = self._prefetches.begin(prefix)
        standing = StandingPrefetch(asked.message_id, asked.action, prefix, asked.now + seconds, num_wanted)
        if begun is not None:
            return self._go_on(book, standing, begun)
        standing.is_deferred = True
        book.prefetches[standing] = None
        return "deferred", "it begins when there is room and nobody else is loading it", {"ttl_s": seconds}

    def _go_on(self, book: Book, standing: StandingPrefetch, begun: Begun) -> Said:
        """Record the result of a prefetch, and return the answer."""
        book.prefetches.pop(standing, None)
        standing.load = begun.load
        if begun.load is not None:
            standing.ends_at = inf  # it ends with its transfers
            book.prefetches[standing] = None
        number, wanted = begun.num_cached + begun.num_loading, standing.num_wanted_blocks
        if not number:
            return "missing", _UNKNOWN, {}
        numbers = {"num_blocks": number, "num_loading_blocks": begun.num_loading}
        if number < begun.num_found:
            return "clipped", f"there is room for {number} of {begun.num_found} blocks", numbers
        if number < wanted:
            return "clipped", f"{number} of {wanted} blocks are known here", numbers
        return "accepted", None, numbers

    # Pins and prefetches.

    def _find_standing(self, asked: "_Asked", payload: Mapping[str, Any]) -> list[Standing]:
        """Return the tenant's pins and prefetches that a payload names, at least one."""
        ids, others = _IDS & payload.keys(), NAMING_FIELDS & payload.keys()
        if ids:
            if others or ids not in ({"pin_id"}, {"action_id"}, {"action_id", "message_id"}):
                raise InvalidArgumentError(f"expected a pin_id, an action_id or a prefix, got {sorted(ids | others)}")
            found = asked.book.named_by_id(payload)
        else:
            found = asked.book.named_by_prefix(asked.names.find(payload))
        if not found:
            raise UnknownPrefixError
        return found

    def _standing(self) -> list[tuple[Book, Standing]]:
        return [(book, each) for book in self._books.values() for each in (*book.pins, *book.prefetches)]

    def _end_over(self, now: float) -> None:
        """End pins and prefetches whose time is over, and pins that were ended elsewhere."""
        for book, standing in self._standing():
            if standing.ends_at <= now or (isinstance(standing, StandingPin) and standing.pin.has_ended):
                self._end(book, standing)

    def _end(self, book: Book, standing: Standing) -> None:
        """End a pin or a prefetch. If it was deferred, answer that it was not completed."""
        if isinstance(standing, StandingPin):
            del book.pins[standing]
            if not standing.pin.has_ended:
                self._manager.pins.unpin(standing.pin)
            said: Said = ("missing", "it ended before all of it was cached", {"pin_id": standing.pin_id})
        else:
            assert isinstance(standing, StandingPrefetch), f"{standing}: neither a pin nor a prefetch"
            del book.prefetches[standing]
            if standing.load is not None and standing.load in self._prefetches.loads:
                self._prefetches.end(standing.load)
            said = ("rejected", "it ended before there was room for it", {})
        if standing.is_deferred:
            self._settle(book, standing, said)

    def _settle(self, book: Book, standing: Standing, said: Said) -> None:
        """Answer a deferred action."""
        standing.is_deferred = False
        answer = HintAnswer(standing.action, *said)
        self._num_answers[answer.outcome] += 1
        self._num_dropped += len(self._later) == self._later.maxlen
        self._later.append((book, standing.message_id, answer))
        book.correct(standing.message_id, answer)

    def _book_of(self, tenant: str | None) -> Book | None:
        """Return a tenant's book; None if there are too many tenants, and all have pins or prefetches."""
        book = self._books.get(tenant)
        if book is None:
            if len(self._books) >= self._limits.max_tenants:
                idle = next((other for other in self._books.values() if other.is_idle), None)
                if idle is None:
                    return None
                del self._books[idle.tenant]
            book = self._books[tenant] = Book(tenant)
        self._books.move_to_end(tenant)
        return book

    def _seconds(self, payload: Mapping[str, Any]) -> float:
        """Return the time limit of a pin or a waiting prefetch, at most the longest allowed, which is the default."""
        seconds = payload.get("ttl_s")
        if seconds is None:
            return self._limits.max_ttl_s
        wanted = _check_seconds(seconds)
        if not wanted:
            raise wrong("ttl_s", "a number of seconds, more than 0", seconds)
        return min(wanted, self._limits.max_ttl_s)

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise KVBlocksError(f"{call}: expected an executor that isn't closed")


class _Asked:
    """An action with its message, tenant and time."""

    __slots__ = ("action", "book", "message_id", "names", "now")

    def __init__(self, book: Book, message_id: str, action: HintAction, names: PrefixNames, now: float) -> None:
        self.book = book
        self.message_id = message_id
        self.action = action
        self.names = names
        self.now = now

    def payload(self, *fields: str, names: frozenset[str]) -> dict[str, Any]:
        """Return the payload without fields that are None; a salt of None is kept, since it means no salt.

        Raises InvalidArgumentError for unknown fields.
        """
        given, known = self.action.payload, names | {*fields}
        if not known >= given.keys():
            raise wrong("payload", f"fields of {sorted(known)}", sorted(given.keys() - known))
        return {name: value for name, value in given.items() if value is not None or name == "cache_salt"}


def _short(error: InvalidArgumentError) -> str:
    text = str(error)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


def _accepted_pin(standing: StandingPin, seconds: float) -> Said:
    pin = standing.pin
    numbers = {"num_blocks": pin.num_blocks, "num_held_blocks": pin.num_held_blocks, "ttl_s": seconds}
    return "accepted", None, {"pin_id": standing.pin_id, **numbers}


def _counted(found: list[Standing]) -> dict[str, int | float | str]:
    num_pins = sum([isinstance(standing, StandingPin) for standing in found])
    return {"num_pins": num_pins, "num_prefetches": len(found) - num_pins}


def _by_envelope(later: list[tuple[Book, str, HintAnswer]]) -> list[HintAnswers]:
    answers: dict[tuple[str | None, str], list[HintAnswer]] = {}
    for book, message_id, answer in later:
        answers.setdefault((book.tenant, message_id), []).append(answer)
    return [HintAnswers(tenant, message_id, tuple(given)) for (tenant, message_id), given in answers.items()]


def _check_time(now: SupportsFloat) -> float:
    time = check_number("now", now, "a finite number")
    if not -_MOST_SECONDS <= time <= _MOST_SECONDS:
        raise wrong("now", "a finite number", now)
    return float(time)


def _check_seconds(value: Any) -> float:
    """Return the seconds that were asked for, at most the largest float."""
    seconds = check_number("ttl_s", value, "a number of seconds")
    if not 0 <= seconds < inf:
        raise wrong("ttl_s", "a number of seconds, at least 0", value)
    return float(min(seconds, _MOST_SECONDS))
