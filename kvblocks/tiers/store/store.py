"""`SharedStore`: blocks in a store that several servers share.

Invariants:
- `read` gives a block's bytes only if the record before them names this block, and the checksum is right.
- Each call has a time limit: what the store doesn't give in time counts as missing. After a failure no call is made
  until a probe has succeeded.
- A tenant that is to be deleted is not looked up, read or written until the deletion has succeeded.

The store is a cache: others write to it, and it may evict or lose everything. That only costs hits.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvblocks.tiers.disk.complaints import Complaints
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.sealing import NUM_RECORD_BYTES, Payload, Sealer
from kvblocks.tiers.store.address import StoreAddress
from kvblocks.tiers.store.breaker import Breaker
from kvblocks.tiers.store.client import Client, Command
from kvblocks.tiers.store.errors import StoreError, StoreRefusedError
from kvblocks.tiers.store.names import StoreNames
from kvblocks.tiers.store.stats import StoreStats

LEAST_BYTES_PER_SECOND = 50e6
"""A transfer's time limit is `timeout_s`, plus its bytes at this rate. Slower loads seldom beat computing."""

MOST_LOOKUPS = 1024
"""How many blocks one batch asks for; a batch may take `lookup_timeout_s`."""

CLAIM_MS = 10_000
"""How long a claim to write a block keeps others from writing it."""

_SCORE = 2**18  # in a tenant's order by age, blocks of one moment are ordered by position, up to this position

_LOG = logging.getLogger("kvblocks.tiers.store")


@dataclass(frozen=True, slots=True)
class Owner:
    """The salt whose blocks are written. max_blocks: its quota in the whole store, None without one."""

    salt: str | None
    max_blocks: int | None = None


class SharedStore:
    """A store's blocks of one fingerprint and secret.

    Any thread may call it, but no two at a time for the same kind of call: lookups, loads, or stores.

    address: of the store. sealer: makes and checks the records of blocks. clients: for lookups, loads, and stores with
    deletions; `close` closes them. on_failure: called when the store failed, on the thread that saw it, so that
    somebody schedules `probe`.
    """

    def __init__(self, address: StoreAddress, sealer: Sealer, clients: tuple[Client, Client, Client]) -> None:
        self.address = address
        self.on_failure: Callable[[], None] = lambda: None
        self._sealer = sealer
        self._names = StoreNames(sealer)
        self._lookups, self._loads, self._stores = clients
        self._complaints = Complaints(logger=_LOG)
        self._lock = threading.Lock()  # guards the attributes below; not held during I/O or logging
        self._breaker = Breaker(time.monotonic)
        self._stats = StoreStats()
        # By tenant, None for all: how often its deletion was asked for, so that none is forgotten.
        self._undeleted: dict[str | None, int] = {}

    @property
    def stats(self) -> StoreStats:
        """Counters of what was done so far."""
        with self._lock:
            return replace(self._stats, is_away=self._breaker.is_open)

    @property
    def is_away(self) -> bool:
        """Whether calls are of no use: the store failed and hasn't answered since, or all of it is to be deleted."""
        with self._lock:
            return self._breaker.is_open or None in self._undeleted

    # What is there.

    def find(self, asked: Sequence[tuple[str | None, Sequence[bytes]]]) -> list[list[bool]]:
        """Return which blocks are there, for each salt and its digests. What isn't answered in time counts as missing.

        Blocks that are there count as used. Sends a command per block, in batches. No batch begins after
        `lookup_timeout_s`, since a store that answers slowly hasn't failed. O(digests).
        """
        tenants = [self._names.tenant(salt) for salt, _ in asked]
        nothing = [[False] * len(digests) for _, digests in asked]
        keys = [
            self._names.block(tenant, digest)
            for tenant, (_, digests) in zip(tenants, asked, strict=True)
            for digest in digests
        ]
        if not keys:
            return nothing
        self._count(num_lookups=1)
        end_s, answers = time.monotonic() + self.address.lookup_timeout_s, list[Any]()
        try:
            while len(answers) < len(keys) and (not answers or time.monotonic() < end_s):
                commands: list[Command] = [("TOUCH", key) for key in keys[len(answers) : len(answers) + MOST_LOOKUPS]]
                with self._calling():
                    answers += self._lookups.run(commands, self.address.lookup_timeout_s)
        except StoreError:
            return nothing
        self._note_refused(answers)
        there = iter([answer == 1 for answer in answers] + [False] * (len(keys) - len(answers)))
        return [
            [next(there) and not self._is_forbidden(tenant) for _ in digests]
            for tenant, (_, digests) in zip(tenants, asked, strict=True)
        ]

    def read(self, salt: str | None, identities: Sequence[BlockIdentity], num_bytes: int) -> list[memoryview | None]:
        """Return blocks' bytes; None for one that isn't there, or isn't what it should be. num_bytes: of all.

        Raises StoreError if the store doesn't answer in time. O(bytes).
        """
        tenant = self._names.tenant(salt)
        if self._is_forbidden(tenant):
            raise StoreError(f"{self.address}: expected blocks that aren't to be deleted, got some that are")
        commands: list[Command] = [("GET", self._names.block(tenant, one.digest())) for one in identities]
        with self._calling(moves=True):
            values = self._loads.run(commands, self._seconds_for(num_bytes))
        found = [self._open(value, one) for value, one in zip(values, identities, strict=True)]
        good = [payload for payload in found if payload is not None]
        num_missing = sum([value is None or isinstance(value, StoreError) for value in values])
        num_damaged = len(values) - len(good) - num_missing
        self._count(
            num_read_blocks=len(good),
            num_read_bytes=sum(map(len, good)),
            num_missing_blocks=num_missing,
            num_damaged_blocks=num_damaged,
        )
        if num_damaged:
            self._loads.drop_connections()  # their answers may belong to other commands
            number = f"{num_damaged} blocks were not what they should be"
            self._complaints.warn("damage", f"{self.address}: {number}: not used")
        return found

    def write(
        self,
        owner: Owner,
        identities: Sequence[BlockIdentity],
        payloads: Sequence[Payload],
        first: int = 0,
        before: Sequence[bytes] = (),
    ) -> bool:
        """Store the blocks that the store lacks and nobody else is storing. Returns whether all are there, or will be.

        first: the position of the first of them in its prefix. before: the digests of the blocks before it; under a
        quota, these count as used now. Raises StoreError if the store doesn't answer in time. O(bytes).
        """
        tenant = self._names.tenant(owner.salt)
        if self._is_forbidden(tenant):
            return False
        if owner.max_blocks == 0:  # the quota may have been greater before
            with self._calling():
                self._trim(tenant, 0, (), first, ())
            return False
        digests = [identity.digest() for identity in identities]
        keys = [self._names.block(tenant, digest) for digest in digests]
        with self._calling():
            lacking, num_unclaimed = self._claim(keys)
            values = {number: self._seal(identities[number], payloads[number]) for number in lacking}
        num_bytes = sum(map(len, values.values()))
        expiry = () if self.address.ttl_s is None else ("EX", self.address.ttl_s)
        with self._calling(moves=True):
            commands: list[Command] = []
            for number, value in values.items():
                commands += [("SET", keys[number], value, *expiry), ("DEL", self._names.claim(keys[number]))]
            answers = self._stores.run(commands, self._seconds_for(num_bytes)) if commands else []
            num_refused = self._note_refused(answers[::2])
            self._count(
                num_written_blocks=len(values) - num_refused,
                num_written_bytes=num_bytes,
                num_present_blocks=len(keys) - len(values) - num_unclaimed,
                num_refused_blocks=num_refused + num_unclaimed,
            )
            if owner.max_blocks is not None:
                self._trim(tenant, owner.max_blocks, digests, first, before)
        return not num_refused + num_unclaimed

    # Deleting.

    def forget(self, salt: str | None, timeout_s: float) -> int:
        """Delete all keys of a salt, whoever stored them, and return how many.

        Raises StoreError if that failed; then this client uses nothing of the salt until a deletion has succeeded.
        O(keys).
        """
        return self._delete(self._names.tenant(salt), timeout_s)

    def forget_all(self, timeout_s: float) -> int:
        """Delete all blocks of this fingerprint and secret. As `forget`."""
        return self._delete(None, timeout_s)

    def forbid_all(self) -> None:
        """Use nothing until `forget_all` has succeeded. `probe` tries it too."""
        self._forbid(None)

    def _forbid(self, tenant: str | None) -> int:
        with self._lock:
            number = self._undeleted[tenant] = self._undeleted.get(tenant, 0) + 1
            return number

    def _delete(self, tenant: str | None, timeout_s: float) -> int:
        asked = self._forbid(tenant)
        number = self._stores.delete_matching(self._names.pattern(tenant), timeout_s)
        with self._lock:
            if self._undeleted.get(tenant) == asked:  # otherwise it was asked for again meanwhile
                self._undeleted.pop(tenant, None)
        return number

    def _is_forbidden(self, tenant: str) -> bool:
        with self._lock:
            return tenant in self._undeleted or None in self._undeleted

    # Coming back.

    def seconds_to_probe(self) -> float | None:
        """Return how long it is until `probe` is to be called; None if it needn't be called."""
        with self._lock:
            return self._breaker.seconds_to_probe()

    def probe(self) -> bool:
        """Try a store that failed. Returns whether it answers now."""
        try:
            self._lookups.ping(self.address.timeout_s)
        except StoreError as error:
            self._note_failure(error)
            return False
        with self._lock:
            was_away = self._breaker.is_open
            self._breaker.note_answer()
        if was_away:
            _LOG.info("%s: answers again", self.address)
        return True

    def close(self) -> None:
        """Close the clients, and wait for nothing. Calls in progress fail."""
        for client in (self._lookups, self._loads, self._stores):
            client.close()

    # Helpers.

    def _claim(self, keys: Sequence[str]) -> tuple[list[int], int]:
        """Claim blocks that the store lacks. Return the numbers of those to write, and how many the store refused.

        A block is looked up again after it was claimed: another client may have written it just before.
        """
        touched = self._stores.run([("TOUCH", key) for key in keys], self.address.timeout_s)
        absent = [number for number, answer in enumerate(touched) if answer == 0]
        num_refused = self._note_refused(touched)
        commands: list[Command] = []
        for number in absent:
            commands += [
                ("SET", self._names.claim(keys[number]), b"1", "NX", "PX", CLAIM_MS),
                ("TOUCH", keys[number]),
            ]
        answers = self._stores.run(commands, self.address.timeout_s) if commands else []
        num_refused += self._note_refused(answers[::2])
        lacking = [
            number
            for number, claimed, is_there in zip(absent, answers[::2], answers[1::2], strict=True)
            if claimed is True and is_there == 0
        ]
        return lacking, num_refused

    def _trim(
        self, tenant: str, max_blocks: int, digests: Sequence[bytes], first: int, before: Sequence[bytes]
    ) -> None:
        """Keep a tenant's quota in the whole store: the least recently used goes first, and of a prefix its end."""
        index = self._names.index(tenant)
        now = int(time.time() * 10) * _SCORE
        scored = [(now + _SCORE - 1 - min(place, _SCORE - 1), digest) for place, digest in enumerate(digests, first)]
        above = [(now + _SCORE - 1 - min(place, _SCORE - 1), digest) for place, digest in enumerate(before)]
        commands: list[Command] = [("ZADD", index, "XX", *_flat(above))] if above else []
        commands += [("ZADD", index, *_flat(scored))] if scored else []
        commands.append(("ZCARD", index))
        answers = self._stores.run(commands, self.address.timeout_s)
        number = answers[-1]
        if isinstance(number, int) and number > max_blocks:
            (popped,) = self._stores.run([("ZPOPMIN", index, number - max_blocks)], self.address.timeout_s)
            gone = [] if isinstance(popped, StoreError) else popped[::2]
            unlink: list[Command] = [("UNLINK", self._names.block(tenant, digest)) for digest in gone]
            if unlink:
                self._stores.run(unlink, self.address.timeout_s)
            self._count(num_trimmed_blocks=len(gone))

    def _seal(self, identity: BlockIdentity, payload: Payload) -> bytes:
        return b"".join((self._sealer.seal(identity, payload), payload))

    def _open(self, value: Any, identity: BlockIdentity) -> memoryview | None:
        """Return the payload of a value, None if it isn't this block's."""
        if not isinstance(value, bytes):
            return None
        start = NUM_RECORD_BYTES + len(identity.preimage())
        whole = memoryview(value)
        payload = whole[start:]
        return payload if self._sealer.opens(whole[:start], identity, payload) else None

    def _seconds_for(self, num_bytes: int) -> float:
        return self.address.timeout_s + num_bytes / LEAST_BYTES_PER_SECOND

    @contextmanager
    def _calling(self, *, moves: bool = False) -> Iterator[None]:
        """Guard calls of the store. Raises StoreError, and makes no call, while it is away. moves: blocks' bytes."""
        with self._lock:
            is_away = self._breaker.is_open
            if is_away:
                self._count_locked(num_skipped=1)
        if is_away:
            raise StoreError(f"{self.address}: expected a store that answers, got one that failed a moment ago")
        try:
            yield
        except StoreError as error:
            self._note_failure(error)
            raise
        with self._lock:
            if moves:
                self._breaker.note_success()

    def _note_failure(self, error: StoreError) -> None:
        with self._lock:
            self._count_locked(num_failures=1)
            self._breaker.note_failure()
        self._complaints.warn("failure", f"{error}: prompts are computed meanwhile")
        self.on_failure()

    def _note_refused(self, answers: Sequence[Any]) -> int:
        """Return how many answers are refusals or errors, and log the refusals."""
        refused = [answer for answer in answers if isinstance(answer, StoreRefusedError)]
        if refused:
            self._complaints.warn("refused", str(refused[0]))
        return sum([isinstance(answer, StoreError) for answer in answers])

    def _count(self, **more: int) -> None:
        with self._lock:
            self._count_locked(**more)

    def _count_locked(self, **more: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + more[name] for name in more})


def _flat(scored: Sequence[tuple[int, bytes]]) -> list[Any]:
    return [part for pair in scored for part in pair]
