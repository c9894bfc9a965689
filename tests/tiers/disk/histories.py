"""Random histories of a store, run in a process that is killed, and what may be found in the folder afterwards.

The process writes down each action before it does it (`claims`). So whoever opens the folder later knows what must be
there, what may be there, and what must not. Run as a program: `python histories.py FOLDER CLAIMS SEED NUM_TURNS`. With
SLOW_FLUSH=1 in the environment, a flush of the arena takes 10 ms more, so that most kills come within a sync.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

from kvblocks.tiers.disk import DiskStore
from kvblocks.tiers.identity import BlockIdentity

NUM_SLOTS = 48  # slots in use; the store has a few more
BLOCK_BYTES = 6000  # not a multiple of a page, so that slots have a gap
OPTIONS = {"fingerprint": b"a" * 32, "num_block_bytes": BLOCK_BYTES, "block_size": 4, "max_bytes": 2_900_000}


def identity_of(number: int) -> BlockIdentity:
    """Return the identity of a number: of first blocks and later ones, with keys and without, and of other groups."""
    seed = random.Random(number)
    if number % 5 == 4:
        return BlockIdentity(seed.randbytes(32), b"", b"", number)
    parent = seed.randbytes(32) if number % 4 else b""
    return BlockIdentity(parent, seed.randbytes(number % 3 * 100), number.to_bytes(16, "little"))


def number_of(identity: BlockIdentity) -> int:
    return identity.column or int.from_bytes(identity.tokens, "little")


def payload_of(number: int) -> bytes:
    """The bytes of the block with `identity_of(number)`."""
    return random.Random(f"payload {number}").randbytes(BLOCK_BYTES)


# The process that is killed.


class Walker:
    """Does random things to a store, at full speed, and claims each of them before it does it."""

    def __init__(self, folder: str, claims: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.claims = claims
        self.number = seed * 1_000_000
        self.unremembered: dict[int, int] = {}
        self.store = DiskStore(folder, **OPTIONS)
        self.claim("opened")

    def claim(self, name: str, value: object = None) -> None:
        os.write(self.claims, (json.dumps([name, value]) + "\n").encode())

    def slots(self, most: int) -> list[int]:
        return self.random.sample(range(NUM_SLOTS), self.random.randint(1, most))

    def remember(self, changes: dict[int, int | None]) -> None:
        self.claim("remember", list(changes.items()))
        self.store.remember({slot: None if number is None else identity_of(number) for slot, number in changes.items()})

    def write(self) -> None:
        slots = self.slots(4)
        if self.random.random() < 0.5:
            self.remember(dict.fromkeys(slots))
        numbers = list(range(self.number, self.number + len(slots)))
        self.number += len(slots)
        self.claim("write", list(zip(slots, numbers, strict=True)))
        payload = b"".join(map(payload_of, numbers))
        self.store.write(slots, [identity_of(number) for number in numbers], payload)
        for slot, number in zip(slots, numbers, strict=True):
            self.unremembered.pop(slot, None)
            self.unremembered[slot] = number
        if self.random.random() < 0.7:
            self.remember(dict(self.unremembered))
            self.unremembered.clear()

    def forget(self) -> None:
        slots = self.slots(6)
        for slot in slots:
            self.unremembered.pop(slot, None)
        self.remember(dict.fromkeys(slots))

    def sync(self) -> None:
        self.claim("sync")
        self.store.sync()
        self.claim("synced")

    def erase(self) -> None:
        slots = self.slots(3)
        for slot in slots:
            self.unremembered.pop(slot, None)
        self.claim("erase", slots)
        self.store.erase(slots)
        self.claim("synced")

    def reopen(self) -> None:
        self.claim("sync")
        self.store.close()
        self.claim("synced")
        self.store = DiskStore(self.folder, **OPTIONS)

    def turn(self) -> None:
        turns = [(self.write, 60), (self.forget, 12), (self.sync, 20), (self.erase, 4), (self.reopen, 1)]
        self.random.choices([call for call, _ in turns], [weight for _, weight in turns])[0]()


# What may be found.


class Claims:
    """What a history's claims say of the folder.

    state: the index after the last sync, in its order. pending: what was remembered since then. is_syncing: whether a
    sync had begun, so that the index may have `pending`. written: by slot, the numbers that were ever written there,
    the last one last. untouched: by slot, the number that was remembered since the slot was last written.
    """

    def __init__(self) -> None:
        self.state: dict[int, int] = {}
        self.pending: dict[int, int | None] = {}
        self.is_syncing = False
        self.written: dict[int, list[int]] = {}
        self.untouched: dict[int, set[int]] = {}

    def read(self, lines: list[str]) -> None:
        for name, value in map(json.loads, lines):
            getattr(self, f"_{name}")(value)

    def _opened(self, _: None) -> None:
        pass

    def _remember(self, changes: list[tuple[int, int | None]]) -> None:
        for slot, number in changes:
            self.pending.pop(slot, None)
            self.pending[slot] = number
            if number is not None:
                self.untouched.setdefault(slot, set()).add(number)

    def _write(self, blocks: list[tuple[int, int]]) -> None:
        for slot, number in blocks:
            self.written.setdefault(slot, []).append(number)
            self.untouched.pop(slot, None)

    def _erase(self, slots: list[int]) -> None:
        self._remember([(slot, None) for slot in slots])
        for slot in slots:
            self.untouched.pop(slot, None)
        self.is_syncing = True

    def _sync(self, _: None) -> None:
        self.is_syncing = True

    def _synced(self, _: None) -> None:
        self.state = self.after_sync()
        self.pending = {}
        self.is_syncing = False

    def after_sync(self) -> dict[int, int]:
        """The index's state if `pending` were committed."""
        kept = {slot: number for slot, number in self.state.items() if slot not in self.pending}
        return kept | {slot: number for slot, number in self.pending.items() if number is not None}

    def check(self, store: DiskStore) -> None:
        """Compare a store that was opened after a crash with the claims, and go on from its state."""
        remembered = {slot: number_of(identity) for slot, identity in store.remembered()}
        assert all(identity == identity_of(number_of(identity)) for _, identity in store.remembered())
        possible = [self.state, self.after_sync()] if self.is_syncing else [self.state]
        assert [*remembered.items()] in [[*state.items()] for state in possible]
        before = store.stats.num_damaged_blocks
        out = bytearray(BLOCK_BYTES)
        for slot, number in remembered.items():
            if number in self.untouched.get(slot, ()):  # its bytes came before its row, and nobody wrote since
                assert store.read([slot], [identity_of(number)], out) == 1, (slot, number)
                assert out == payload_of(number)
        assert store.stats.num_damaged_blocks == before == 0
        for slot, numbers in self.written.items():
            for number in {*numbers[-3:], remembered.get(slot, numbers[0])}:
                if store.read([slot], [identity_of(number)], out):
                    assert number in numbers and out == payload_of(number), (slot, number)
            assert store.read([slot], [identity_of(10**9)], out) == 0
        self.state, self.pending, self.is_syncing = remembered, {}, False


def slow_down() -> None:
    """Have a flush take longer, before it and after it."""
    name = "fdatasync" if hasattr(os, "fdatasync") else "fsync"
    flush = getattr(os, name)

    def flush_slowly(descriptor: int) -> None:
        time.sleep(0.005)
        flush(descriptor)
        time.sleep(0.005)

    setattr(os, name, flush_slowly)


def main() -> None:
    folder, path, seed, num_turns = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    if os.environ.get("SLOW_FLUSH"):
        slow_down()
    walker = Walker(folder, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), seed)
    for _ in range(num_turns):
        walker.turn()
    walker.claim("sync")
    walker.store.close()
    walker.claim("synced")


if __name__ == "__main__":
    main()
