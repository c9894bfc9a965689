"""Random hints of several tenants among random requests: no lock, nobody else's blocks, no budget passed, no leak.

`python tests/wire/test_hints_machine.py FIRST END STEPS [groups]` walks from other seeds.
"""

import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.tier_machine import MAX_TOKENS, SALTS, TierMachine

import kvblocks
from kvblocks import FullAttention, Loaded, SlidingWindow, Tier
from kvblocks.retention.quotas import salt_in
from kvblocks.wire.hints import HintExecutor, HintLimits
from kvblocks.wire.hints.envelope import HintAnswers
from kvblocks.wire.hints.prefetch import LoadId

TENANTS = [None, *SALTS]
BUDGETS = {None: 6, "salt": 4, "other": 3}
OUTCOMES = {"accepted", "clipped", "deferred", "rejected", "missing"}


class HintMachine(TierMachine):
    """`TierMachine`, with an executor of hints beside it, whose loads are nobody's sequences."""

    def __init__(self, *given: Any, may_evict: bool, **options: Any) -> None:
        super().__init__(*given, **options)
        self.may_evict = may_evict
        cut = self.memory.cut  # of the machine's own sequences
        self.memory.cut = lambda found: cut([one for one in found if not is_prefetch(one)])  # type: ignore[method-assign]
        limits = HintLimits(
            max_actions=6, max_pins=5, max_deferred=3, max_remembered=64, max_ttl_s=40.0, max_tokens=100,
            max_prefetch_share=0.3, reserved_share=0.1, may_evict=may_evict,
        )  # fmt: skip
        self.executor = HintExecutor(self.manager, max_pinned_blocks=1, budgets=BUDGETS, limits=limits)
        self.now = 0.0
        self.num_sent = 0
        self.sent: list[tuple[str | None, dict[str, Any]]] = []
        self.last: dict[tuple[str | None, str, str], dict[str, Any]] = {}  # the last answer to each action
        self.owed: set[tuple[str | None, str, str]] = set()  # of what was deferred

    # Hints.

    def do_hints(self) -> None:
        tenant = self.random.choice([None, *TENANTS])
        self.num_sent += 1
        actions = [self.make_action(tenant, number) for number in range(self.random.randint(1, 4))]
        envelope = self.envelope(actions)
        self.send(tenant, envelope)
        self.sent = [*self.sent[-2:], (tenant, envelope)]

    def do_bring_back(self) -> None:
        """Prefetch a prefix that was evicted."""
        self.answer_all()
        self.do_crowd()
        if self.past:
            other = self.random.choice(self.past)
            payload = {"token_ids": other.token_ids(), "extra_keys": [list(key) for key in other.extra_keys]}
            self.num_sent += 1
            action = {"action_id": "0", "action_type": "prefetch", "action_version": "1.0", "payload": payload}
            free, held = self.manager.num_free_blocks, self.executor._prefetches._num_held  # noqa: SLF001
            self.send(other.salt, self.envelope([action]))
            taken = free - self.manager.num_free_blocks
            assert taken <= self.executor._prefetches._num_held - held  # noqa: SLF001

    def envelope(self, actions: list[dict[str, Any]]) -> dict[str, Any]:
        return {"protocol_version": "0.1", "message_id": f"message {self.num_sent}", "actions": actions}

    def do_hints_again(self) -> None:
        """An action that comes again is answered as before, and not done again."""
        if not self.sent:
            return
        self.do_hint_step()
        tenant, envelope = self.random.choice(self.sent)
        first = {key for key in self.last if key[:2] == (tenant, envelope["message_id"])}
        before = {key: self.last[key] for key in first}
        pins = list(self.manager.pins)
        free, stats = self.manager.num_free_blocks, self.executor.stats
        answers = self.executor.carry_out(envelope, tenant, self.now)
        for action, answer in zip(envelope["actions"], answers.to_dict()["actions"], strict=True):
            assert answer == before.get((tenant, envelope["message_id"], action.get("action_id")), answer)
        assert (list(self.manager.pins), self.manager.num_free_blocks) == (pins, free)
        assert self.executor.stats.num_pins == stats.num_pins
        self.count("repeated", self.executor.stats.num_repeated - stats.num_repeated)

    def send(self, tenant: str | None, envelope: dict[str, Any]) -> None:
        others, stood = self.seen_by_others(tenant), self.pins_of_others(tenant)
        answers = self.executor.carry_out(envelope, tenant, self.now)
        if not self.may_evict:
            assert self.seen_by_others(tenant) == others, f"{envelope}: somebody else's blocks changed"
        stand = self.pins_of_others(tenant)  # they may hold more: blocks that they lacked and that are cached by now
        assert len(stand) == len(stood), f"{envelope}: somebody else's pins changed"
        for (pin, blocks), (same_pin, held) in zip(stand, stood, strict=True):
            assert pin == same_pin and blocks[: len(held)] == held, f"{envelope}: somebody else's pins hold less"
        self.note(answers)
        given = answers.to_dict()
        assert (answers.tenant, given["message_id"]) == (tenant, envelope["message_id"])
        for action, answer in zip(envelope["actions"], given["actions"], strict=True):
            assert answer["action_id"] == action.get("action_id", "")
            payload = action.get("payload", {})
            if payload.get("cache_salt", tenant) != tenant and "token_ids" in payload:
                assert answer["payload"]["outcome"] in ("missing", "rejected"), f"{action}: {answer}"

    def note(self, answers: HintAnswers, *, is_later: bool = False) -> None:
        for answer in answers.to_dict()["actions"]:
            key, outcome = (answers.tenant, answers.message_id, answer["action_id"]), answer["payload"]["outcome"]
            assert outcome in OUTCOMES
            self.count(f"{answer['action_type']} {outcome}")
            if is_later:
                assert outcome != "deferred"
                self.owed.remove(key)
            elif outcome == "deferred":
                self.owed.add(key)
            if answer["action_id"]:
                self.last[key] = answer

    def make_action(self, tenant: str | None, number: int) -> dict[str, Any]:
        kind = self.random.choice(["pin", "pin", "prefetch", "prefetch", "kv.prefetch", "release", "expire", "retain"])
        payload = self.make_name(tenant, kind)
        if self.random.random() < 0.5:
            payload["ttl_s"] = self.random.choice([0, 1, 5, 30, 100, -1])
        if kind == "pin" and self.random.random() < 0.5:
            payload["priority"] = self.random.choice([0, 20, 99, 100, 101])
        action = {"action_id": f"{number}", "action_type": kind, "action_version": "1.0", "payload": payload}
        if self.random.random() < 0.05:
            del action[self.random.choice([*action])]
        return action

    def make_name(self, tenant: str | None, kind: str) -> dict[str, Any]:
        """Any prefix of any tenant, named under the tenant's own salt or another one."""
        chance, others = self.random.random(), self.running + self.waiting + self.past
        if kind not in ("pin", "retain") and chance < 0.3:
            return {"pin_id": f"hint-{self.random.randint(1, 9)}"}
        if kind not in ("pin", "retain") and chance < 0.6:
            return {"action_id": "0", "message_id": f"message {self.num_sent - self.random.randrange(5)}"}
        if not others:
            return {"token_ids": [0] * 8}
        own = [one for one in others if one.salt == tenant]
        other = self.random.choice(own if own and self.random.random() < 0.7 else others)
        if self.random.random() < 0.3:
            hashes = self.manager.inspect.block_hashes(other)
            low = [int.from_bytes(digest[-8:], "big") for digest in hashes]
            return {"block_hashes": low if self.random.random() < 0.5 else [digest.hex() for digest in hashes]}
        tokens = other.token_ids()[: self.random.choice([3, 8, MAX_TOKENS])]
        keys = [list(key) for key in other.extra_keys if key[1] <= len(tokens)]
        salted = {"cache_salt": other.salt} if self.random.random() < 0.5 else {}
        return {"token_ids": tokens, "extra_keys": keys, **salted}

    def do_hint_step(self) -> None:
        self.now += self.random.choice([0.0, 0.1, 2.0])
        for answers in self.executor.step(self.now):
            self.note(answers, is_later=True)

    def seen_by_others(self, tenant: str | None) -> set[tuple[int, int, int]]:
        """Where all blocks of other tenants are cached."""
        return {
            (block.block_id, id(block.run), block.index)
            for block in self.manager.blocks
            if block.run is not None and block.is_cached and salt_in(block.run.first_keys) != tenant
        }

    def pins_of_others(self, tenant: str | None) -> list[tuple[int, list[int]]]:
        pins = [pin for pin in self.manager.pins if pin.sequence.salt != tenant]
        return [(id(pin), [block.block_id for block in [*pin.blocks, *pin.attached_blocks]]) for pin in pins]

    # What a request finds.

    def do_probe(self) -> None:
        """A request gets all blocks that running ones don't have, at the latest when current loads have ended."""
        if len(self.manager.groups) > 1:
            return
        self.answer_all()
        self.do_hint_step()  # may begin other loads
        if self.random.random() < 0.5:
            self.do_bring_back()
        self.step()
        owned = {block.block_id for sequence in self.running for block in self.blocks_of(sequence)}
        num_left = self.manager.num_blocks - len(owned)
        if not num_left:
            return
        self.num_made += 1
        request = kvblocks.Sequence(self.num_made, [7] * (num_left * self.manager.block_size))
        num_held = self.held_by_pins()
        if self.manager.allocate_slots(request, delay_cache_blocks=True) is None:
            assert self.executor.stats.num_loading, self.manager.last_refusal
            self.count("probes that waited for loads")
            self.answer_all()
            self.do_hint_step()
            assert not self.executor.stats.num_loading
            assert self.manager.allocate_slots(request, delay_cache_blocks=True) is not None, self.manager.last_refusal
        self.count("probes")
        self.count("probes that pins gave way to", self.held_by_pins() < num_held)
        self.manager.abort(request, 0)

    def answer_all(self) -> None:
        while self.moving or self.waits_from or self.manager.tiers.is_busy:
            self.do_take_transfers()
            if not self.moving:
                break
            for moving in list(self.moving):
                self.answer(moving)

    def held_by_pins(self) -> int:
        return sum(pin.num_held_blocks for pin in self.manager.pins)

    def do_pin(self) -> None:
        """An operator pins, with a priority below 100."""
        if self.waiting and self.random.random() < 0.3:
            other = self.random.choice(self.waiting)
            if other.num_tokens >= self.manager.block_size and len(self.pins) < 2:
                with suppress(kvblocks.PinBudgetError):
                    self.pins.append(
                        self.manager.pins.pin(other.token_ids(), salt=other.salt, extra_keys=other.extra_keys)
                    )

    def do_hold(self) -> None:
        """Holds keep blocks from everybody, so this machine makes none."""

    do_detach = do_hold

    # What `TierMachine` does.

    def end_load(self, loaded: Loaded) -> None:
        if is_prefetch(loaded.sequence):
            self.count("prefetched" if loaded.is_whole else "prefetched in part")
            self.memory.arrive(loaded.sequence, loaded.num_tokens)
        else:
            super().end_load(loaded)

    def check(self) -> None:
        super().check()
        stats = self.executor.stats
        books = self.executor._books  # noqa: SLF001
        for tenant, book in books.items():
            assert book.num_pinned_blocks <= BUDGETS[tenant]
            assert len(book.pins) <= 5 and len(book._answers) <= 64  # noqa: SLF001
            assert all(pin.pin.sequence.salt == tenant for pin in book.pins)
        assert stats.num_pinned_blocks <= self.manager.pins.max_blocks
        loads = self.executor._prefetches.loads  # noqa: SLF001
        assert sum(load.num_held_blocks for load in loads) <= 0.3 * self.manager.num_blocks
        standing = self.executor._standing()  # noqa: SLF001
        owed = {(book.tenant, one.message_id, one.action.action_id) for book, one in standing if one.is_deferred}
        later = self.executor._later  # noqa: SLF001
        owed |= {(book.tenant, message_id, answer.action.action_id) for book, message_id, answer in later}
        assert owed == self.owed

    def finish(self) -> None:
        self.now += 1000
        self.do_hint_step()
        assert not self.owed, "what was deferred was never answered"
        self.do_hints()
        self.do_hints()
        self.executor.close()
        self.executor.close()
        assert len(self.manager.pins) == len(self.pins)
        super().finish()


def is_prefetch(sequence: kvblocks.Sequence) -> bool:
    return isinstance(sequence.sequence_id, LoadId)


def make_machine(seed: int, *, debug: bool = False, is_grouped: bool = False) -> HintMachine:
    chosen = random.Random(seed)
    size = chosen.choice([1, 2, 4])
    tiers = [
        Tier("host", chosen.choice([16, 60]), 100, store=chosen.choice(["freed", "computed"]), max_transfer_blocks=2)
    ]
    if chosen.random() < 0.3:
        tiers.append(Tier("disk", 80, 100))
    options: dict[str, Any] = {"debug": debug, "may_evict": chosen.random() < 0.3}
    options["hash_algorithm"] = chosen.choice(["xxh3_128", lambda preimage: bytes([sum(preimage) % 250])])
    if is_grouped:
        return HintMachine(
            seed, 96 // size, None, tiers, groups=[FullAttention(size), SlidingWindow(size, 5)], **options
        )
    return HintMachine(seed, chosen.choice([40, 64]) // size, size, tiers, **options)


def walk(first: int, end: int, num_steps: int, *, is_grouped: bool) -> dict[str, int]:
    counts: dict[str, int] = {}
    for seed in range(first, end):
        machine = make_machine(seed, debug=seed == first, is_grouped=is_grouped)
        add_hints(machine)
        try:
            machine.walk(num_steps)
            machine.finish()
        except BaseException:
            print(f"seed {seed}")
            raise
        for what, number in machine.counts.items():
            counts[what] = counts.get(what, 0) + number
    return counts


def add_hints(machine: HintMachine) -> None:
    """Make operations of hints more frequent than those of other machines."""
    extra: list[tuple[str, int]] = [
        ("do_hints", 12),
        ("do_hint_step", 8),
        ("do_hints_again", 3),
        ("do_bring_back", 6),
        ("do_probe", 6),
    ]
    machine._operations += [name for name, weight in extra for _ in range(weight)]  # noqa: SLF001


@pytest.mark.parametrize("is_grouped", [False, True], ids=["one group", "several groups"])
def test_hints_lock_nothing_and_touch_nobody(*, is_grouped: bool) -> None:
    counts = walk(0, 60, 300, is_grouped=is_grouped)
    # Walks that never met these would prove little.
    met = ["pin accepted", "pin clipped", "pin deferred", "pin rejected", "pin missing", "release accepted", "repeated"]
    met += ["prefetch accepted", "prefetch clipped", "prefetch missing", "prefetched", "expire accepted"]
    met += (
        []
        if is_grouped
        else ["probes that pins gave way to", "probes that waited for loads", "prefetch deferred", "prefetched in part"]
    )
    assert all(counts.get(what, 0) > 0 for what in met), counts


if __name__ == "__main__":
    print(walk(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), is_grouped=sys.argv[4:] == ["groups"]))
