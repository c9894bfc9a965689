"""KV hints: what an orchestrator says of prefixes, carried out on a manager's pins and tiers, each action answered.

The envelope is that of vLLM and Dynamo (`envelope`); the payloads of `pin`, `release`, `expire`, `prefetch` and
`retain` are this project's, since none is agreed on. docs/wire-hints.md shows them.

A hint is a wish, and no request ever waits for one: pins of hints give up blocks before a call is refused, since their
priority is below 100; loads hold at most a share of the pool, and leave a share of it free. Each caller is one tenant,
who names prefixes of its own salt only, within a budget of its own. Whatever else it names is as unknown to it as what
there is not. So no order of hints locks the pool, or touches what another tenant has.

Sans-IO: no clock, no thread. Times are the caller's, and what waits goes on in `step`. Invariants: what a tenant has
pinned is for at most its budget; of each tenant at most max_pins pins, max_deferred prefetches, waiting or loading, and
max_remembered answers are kept; an action that is deferred is answered again, once, unless the executor is closed
before. A call that an interrupt ends (KeyboardInterrupt) may leave a pin, or a sequence that loads, which only the
manager knows of.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from math import inf
from sys import float_info
from typing import Any, SupportsFloat, SupportsIndex

from kvblocks.arguments import Text, check_count, check_name, check_number, is_a, wrong
from kvblocks.errors import InvalidArgumentError, KVBlocksError, PinBudgetError
from kvblocks.manager import KVCacheManager
from kvblocks.retention.pins import Pin
from kvblocks.wire.hints.book import Book, Standing, StandingPin, StandingPrefetch, fingerprint, without_payload
from kvblocks.wire.hints.envelope import ACTION_VERSION, HintAction, HintAnswer, HintAnswers, Outcome, parse_envelope
from kvblocks.wire.hints.limits import HintLimits, HintStats
from kvblocks.wire.hints.prefetch import Begun, Prefetches
from kvblocks.wire.hints.prefix import NAMING_FIELDS, NamedPrefix, PrefixNames, UnknownPrefixError

PIN_PRIORITY = 50
"""Of a pin that says nothing else."""

_MOST_CHARACTERS = 1000  # of a reason, which is kept as long as the answer
_IDS = frozenset({"pin_id", "action_id", "message_id"})
_MOST_SECONDS = float_info.max  # an int may be more
_UNKNOWN = "nothing by this name is known here"

Said = tuple[Outcome, str | None, Mapping[str, int | float | str]]
"""What is answered: the outcome, why, and in numbers."""


class HintExecutor:
    """Carries hints out on `manager`, which others use as ever, on the same thread.

    max_pinned_blocks: what each tenant's pins may be for together; all pins together have the manager's `pin_budget`.
    budgets: of tenants that have another one. limits: other bounds. Raises InvalidArgumentError.
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
        self._books: OrderedDict[str | None, Book] = OrderedDict()  # the longest unused first
        self._later: deque[tuple[Book, str, HintAnswer]] = deque(maxlen=self._limits.max_remembered)
        self._num_answers: Counter[str] = Counter()
        self._num_repeated = self._num_dropped = 0
        self._last_refusal = manager.last_refusal
        self._is_closed = False

    @property
    def stats(self) -> HintStats:
        """Counters. O(what stands)."""
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
        """When `step` has to end something at the latest, None: never. O(what stands)."""
        first = min([standing.ends_at for _, standing in self._standing()], default=inf)
        return None if first == inf else first

    def carry_out(self, envelope: object, tenant: Text | None, now: SupportsFloat) -> HintAnswers:
        """Carry out the actions of an envelope in their order, and return an answer to each.

        envelope: plain values, see `envelope`. tenant: the salt (None: none) that the caller acts for. now: the
        time on the caller's clock. An action that came before, by its message_id and action_id, is answered as before
        and not carried out again, while its answer is kept; with another content it is rejected.

        Raises InvalidArgumentError for what is no envelope as a whole, having done nothing of it. O(tokens named + what
        stands), and O(pool) if hashes are named, once and again after each prefetch that began or ended.
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
        """End what is over, go on with what waits, and return the answers to what was deferred before.

        Call it between two steps of the engine, after `tiers.complete` has told of what arrived. After a call of the
        manager's was refused (None) no load begins in the next step. O(what stands + blocks).
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
        """End and forget all that a tenant has sent, the answers too, to delete its data; see `manager.forget_salt`.

        Nothing is answered any more. Raises InvalidArgumentError. O(what stands).
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
        """End all pins and loads of hints. Nothing is carried out after it. Nothing the second time."""
        if self._is_closed:
            return
        for book, standing in self._standing():
            self._end(book, standing)
        self._is_closed = True

    # One action.

    def _answer(self, asked: "_Asked") -> HintAnswer:
        """Carry an action out, unless it was, and remember the answer."""
        action, book = asked.action, asked.book
        if action.problem is not None:
            return self._refuse(action, action.problem)
        try:
            own_print = fingerprint(action)
        except InvalidArgumentError as error:
            return self._refuse(action, _short(error))
        kept = book.recall(asked.message_id, action.action_id)
        if kept is not None and kept[0] != own_print:
            return self._refuse(action, "expected another action_id: an action of another content had this one")
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
        kind = action.action_type.removeprefix("kv.")  # as Dynamo calls its own
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
            return "deferred", "what isn't cached yet is held from when it is", numbers
        return "accepted", None, numbers

    def _make_pin(self, book: Book, prefix: NamedPrefix, level: int) -> Pin | None:
        """Pin as many first blocks of a prefix as budgets have room for; None: for none."""
        manager = self._manager
        own_room = self._budgets.get(book.tenant, self._max_pinned_blocks) - book.num_pinned_blocks
        room = min(own_room, manager.max_pinned_blocks - sum([pin.num_wanted_blocks for pin in manager.pins]))
        number, less = min(prefix.num_blocks, room), 1
        while number > 0:
            tokens, keys = prefix.packed(number)
            ranges = [(0, number * manager.block_size, level)]
            try:
                pin = manager.pin(tokens, salt=prefix.salt, lora=prefix.lora, extra_keys=keys, priority=ranges)
            except PinBudgetError:  # windows' blocks count, too
                number -= less
                less *= 2
                continue
            excess = pin.num_wanted_blocks - room
            if excess <= 0:
                return pin
            manager.unpin(pin)
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
        return "deferred", "it begins when there is room, and nobody else brings it", {"ttl_s": seconds}

    def _go_on(self, book: Book, standing: StandingPrefetch, begun: Begun) -> Said:
        """Note what came of a prefetch, and say so."""
        book.prefetches.pop(standing, None)
        standing.load = begun.load
        if begun.load is not None:
            standing.ends_at = inf  # with its transfers
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

    # What stands.

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
        """End what is over: by time, or since somebody else ended the pin."""
        for book, standing in self._standing():
            if standing.ends_at <= now or (isinstance(standing, StandingPin) and standing.pin.has_ended):
                self._end(book, standing)

    def _end(self, book: Book, standing: Standing) -> None:
        """End a pin or a prefetch. What was deferred is answered: it didn't come to that."""
        if isinstance(standing, StandingPin):
            del book.pins[standing]
            if not standing.pin.has_ended:
                self._manager.unpin(standing.pin)
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
        """Answer what was deferred."""
        standing.is_deferred = False
        answer = HintAnswer(standing.action, *said)
        self._num_answers[answer.outcome] += 1
        self._num_dropped += len(self._later) == self._later.maxlen
        self._later.append((book, standing.message_id, answer))
        book.correct(standing.message_id, answer)

    def _book_of(self, tenant: str | None) -> Book | None:
        """Return a tenant's book; None where there are too many tenants, all of which have hints."""
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
        """Return how long a pin is to stand, or a prefetch to wait: at most what is allowed, which is the default."""
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
    """An action, and all that goes with it."""

    __slots__ = ("action", "book", "message_id", "names", "now")

    def __init__(self, book: Book, message_id: str, action: HintAction, names: PrefixNames, now: float) -> None:
        self.book = book
        self.message_id = message_id
        self.action = action
        self.names = names
        self.now = now

    def payload(self, *fields: str, names: frozenset[str]) -> dict[str, Any]:
        """Return the payload, without fields that are None; as a salt that says something.

        Raises InvalidArgumentError for fields that it can't have.
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
    """Return seconds that were asked for; more than a float holds are the most that it does."""
    seconds = check_number("ttl_s", value, "a number of seconds")
    if not 0 <= seconds < inf:
        raise wrong("ttl_s", "a number of seconds, at least 0", value)
    return float(min(seconds, _MOST_SECONDS))
