"""`SharedStore`: blocks in a store that several servers share.

Invariants:

- `read` gives a block's bytes only if the record before them names this block, and the checksum is right.
- Each call has a time limit: what the store doesn't return in time counts as missing. After a failure no call is made
  until a probe has succeeded.
- A tenant that is to be deleted is not looked up, read or written until the deletion has succeeded.

The store is a cache: others write to it, and it may evict or lose everything. That only costs hits.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha1
from itertools import chain
from secrets import token_hex
from typing import Any

from kvblocks.tiers.disk.complaints import Complaints
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.sealing import NUM_RECORD_BYTES, Payload, Sealer
from kvblocks.tiers.store.address import StoreAddress
from kvblocks.tiers.store.client import Client, Command, StoreError, StoreRefusedError
from kvblocks.tiers.store.names import StoreNames
from kvblocks.tiers.store.quotas import StoreQuotas
from kvblocks.tiers.store.scripts import DELETE_VALUE, WRITE

LEAST_BYTES_PER_SECOND = 50e6
"""A transfer's time limit is `timeout_s`, plus its bytes at this rate. Slower loads seldom beat computing."""

MOST_LOOKUPS = 1024
"""How many blocks one batch asks for; a batch may take `lookup_timeout_s`."""

CLAIM_MS = 10_000
"""How long a claim to write a block keeps others from writing it."""

TOMBSTONE_MS = 24 * 3600 * 1000
"""How long a deletion is remembered: longer than any write that it meets may take."""

TRIES = 3
"""How often to claim a block again whose claim is gone before it is written, since the store may evict any key."""

FIRST_PAUSE_S = 0.1
"""How long a store is not called after its first failure. Half of it is random."""

MOST_PAUSE_S = 10.0
"""How long a store is not called at most."""

SHUN_S = 60.0
"""For how many seconds a bad value that couldn't be deleted is not looked up."""

_LOG = logging.getLogger("kvblocks.tiers.store")


@dataclass(frozen=True, slots=True)
class Owner:
    """The salt whose blocks are written. max_blocks: its quota in the whole store; None without one."""

    salt: str | None
    max_blocks: int | None = None


@dataclass(frozen=True)
class StoreStats:
    """What was done since the client was made.

    - num_lookups: requests to the store that asked for blocks.
    - num_written_blocks, num_written_bytes: what was sent.
    - num_present_blocks: blocks that were not sent, because the store had them or somebody else was sending them.
    - num_read_blocks, num_read_bytes: what was read and right.
    - num_missing_blocks: asked for, but gone.
    - num_damaged_blocks: read, but damaged or another block.
    - num_refused_blocks: blocks whose write the store refused, for example because it was full.
    - num_failures: calls that ended without all answers.
    - num_skipped: calls that were not made because of an earlier failure.
    - num_trimmed_blocks: blocks deleted to keep a quota.
    - is_away: whether the store counts as unreachable now.
    """

    num_lookups: int = 0
    num_written_blocks: int = 0
    num_written_bytes: int = 0
    num_present_blocks: int = 0
    num_read_blocks: int = 0
    num_read_bytes: int = 0
    num_missing_blocks: int = 0
    num_damaged_blocks: int = 0
    num_refused_blocks: int = 0
    num_failures: int = 0
    num_skipped: int = 0
    num_trimmed_blocks: int = 0
    is_away: bool = False


class SharedStore:
    """A store's blocks of one fingerprint and secret.

    Any thread may call it, but no two at a time for the same kind of call: lookups, loads, or stores.
    """

    def __init__(self, address: StoreAddress, sealer: Sealer, clients: tuple[Client, Client, Client]) -> None:
        """sealer: makes and checks the records of blocks. clients: one each for lookups, loads, and stores with
        deletions; `close` closes them.
        """
        self.address = address
        """That of the store."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called when the store failed, on the thread that noticed, to have `probe` scheduled."""
        self._sealer = sealer
        self._names = StoreNames(sealer)
        self._lookups, self._loads, self._stores = clients
        self._complaints = Complaints(logger=_LOG)
        self._lock = threading.Lock()  # guards the attributes below; not held during I/O or logging
        self._breaker = Breaker(time.monotonic)
        self._stats = StoreStats()
        # By tenant, None for all: how often its deletion was asked for, so that none is forgotten.
        self._undeleted: dict[str | None, int] = {}
        self._shunned: dict[str, float] = {}  # bad values that couldn't be deleted, and until when they aren't touched
        self._quotas = StoreQuotas(address, self._names, self._stores)

    @property
    def stats(self) -> StoreStats:
        """Counters since this client was made."""
        with self._lock:
            return replace(self._stats, is_away=self._breaker.is_open)

    @property
    def is_away(self) -> bool:
        """Whether calls are useless now: the store failed and hasn't answered since, or all of it is to be deleted."""
        with self._lock:
            return self._breaker.is_open or None in self._undeleted

    # What is there.

    def find(self, asked: Sequence[tuple[str | None, Sequence[bytes]]]) -> list[list[bool]]:
        """Return which blocks are there, for each salt and its digests. What isn't answered in time counts as missing.

        Blocks that are there count as used. Sends a command per block, in batches. No batch begins after
        `lookup_timeout_s`, but a store that only answers slowly doesn't count as failed. O(digests).
        """
        tenants = [self._names.tenant(salt) for salt, _ in asked]
        nothing = [[False] * len(digests) for _, digests in asked]
        names = [
            [self._names.block(tenant, digest) for digest in digests]
            for tenant, (_, digests) in zip(tenants, asked, strict=True)
        ]
        keys = self._worth_asking(names)
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
        there = {key for key, answer in zip(keys, answers, strict=False) if answer == 1}
        return [
            [key in there and not self._is_forbidden(tenant) for key in of_salt]
            for tenant, of_salt in zip(tenants, names, strict=True)
        ]

    def read(self, salt: str | None, identities: Sequence[BlockIdentity], num_bytes: int) -> list[memoryview | None]:
        """Return blocks' bytes, with None for a block that isn't there or isn't what it should be. num_bytes: of all.

        A value that isn't its block is deleted from the store. Raises StoreError if the store doesn't answer in time.
        O(bytes).
        """
        tenant = self._names.tenant(salt)
        if self._is_forbidden(tenant):
            raise StoreError(f"{self.address}: expected blocks that aren't to be deleted, got some that are")
        commands: list[Command] = [("GET", self._names.block(tenant, one.digest())) for one in identities]
        with self._calling(moves=True):
            values = self._loads.run(commands, self._seconds_for(num_bytes))
        found = [self._open(value, one) for value, one in zip(values, identities, strict=True)]
        good = [payload for payload in found if payload is not None]
        bad = [number for number, payload in enumerate(found) if payload is None and _is_bad(values[number])]
        self._count(
            num_read_blocks=len(good),
            num_read_bytes=sum(map(len, good)),
            num_missing_blocks=len(values) - len(good) - len(bad),
            num_damaged_blocks=len(bad),
        )
        if bad:
            self._loads.drop_connections()  # their answers may belong to other commands
            number = f"{len(bad)} blocks were not what they should be"
            self._complaints.warn("damage", f"{self.address}: {number}: not used, and deleted")
            self._delete_bad(tenant, [identities[number] for number in bad], [values[number] for number in bad])
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

        first: the position of the first of them in its prefix. before: the digests of the blocks before it. Under a
        quota these count as used now, and blocks beyond the quota are left out, whatever is returned. If any server
        deletes the tenant meanwhile, nothing is written after that. Raises StoreError if the store doesn't answer in
        time. O(bytes); for a quota whose index was lost, also O(keys of the store).
        """
        tenant = self._names.tenant(owner.salt)
        if self._is_forbidden(tenant):
            return False
        digests = [identity.digest() for identity in identities]
        keys = [self._names.block(tenant, digest) for digest in digests]
        token, is_limited = token_hex(8), owner.max_blocks is not None
        with self._calling():
            seen = self._tombstones(tenant)
            left_out = self._keep_quota(tenant, owner, digests, first, before) if is_limited else frozenset()
            if left_out is None:
                return False
        left = [number for number, digest in enumerate(digests) if digest not in left_out]
        num_refused = 0
        for _ in range(TRIES):
            with self._calling():
                lacking, num_unclaimed = self._claim(keys, left, token)
                if self._was_deleted(tenant, seen):  # asked after the claims, since an earlier deletion removes these
                    self._give_up([keys[number] for number in lacking], token)
                    if is_limited:
                        self._quotas.take_back(tenant, digests)
                    return False
                values = {number: self._seal(identities[number], payloads[number]) for number in lacking}
            with self._calling(moves=True):
                answers = self._put({keys[number]: value for number, value in values.items()}, token)
            self._count(num_present_blocks=len(left) - len(lacking) - num_unclaimed)
            num_refused += self._note_written(values, answers) + num_unclaimed
            left = [number for number, answer in zip(lacking, answers, strict=True) if answer == 0]
            if not left:
                break
        self._count(num_refused_blocks=num_refused)
        return not num_refused + len(left)

    def touch(self, owner: Owner, digests: Sequence[bytes]) -> list[bool]:
        """Count blocks as used, also for their quota if there is one, and return which are there. Raises StoreError.

        This is a call of the stores rather than a lookup, for what needn't be known soon. O(digests).
        """
        tenant = self._names.tenant(owner.salt)
        if self._is_forbidden(tenant):
            return [False] * len(digests)
        answers: list[Any] = []
        with self._calling():
            for start in range(0, len(digests), MOST_LOOKUPS):
                part = digests[start : start + MOST_LOOKUPS]
                touches: list[Command] = [("TOUCH", self._names.block(tenant, digest)) for digest in part]
                answers += self._stores.run(touches, self.address.timeout_s)
            found = [answer == 1 for answer in answers]
            there = [digest for digest, is_there in zip(digests, found, strict=True) if is_there]
            if owner.max_blocks is not None and there:
                self._quotas.note_used(tenant, there)
        self._note_refused(answers)
        return found

    # Deleting.

    def forget(self, salt: str | None, timeout_s: float) -> int:
        """Delete all blocks of a salt, whoever stored them, and return how many keys these were.

        Leaves a tombstone, so that no server writes afterwards what it was writing. Takes at most `timeout_s`, and less
        if the store hangs. Raises StoreError if it failed. In that case the message says what is left, and this client
        uses nothing of the salt until a deletion has succeeded. O(keys of the store).
        """
        return self._delete(self._names.tenant(salt), timeout_s)

    def forget_all(self, timeout_s: float) -> int:
        """Delete all blocks of this fingerprint and secret. See `forget`."""
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
        end_s, number = time.monotonic() + timeout_s, 0
        failure, is_marked = self._mark(tenant, end_s)  # if its node is gone, the others are deleted nevertheless
        try:
            number = self._delete_keys(tenant, end_s)
            if failure is None and not is_marked:  # it was full, and has room now
                failure, is_marked = self._mark(tenant, end_s)
                number += self._delete_keys(tenant, end_s) if is_marked else 0
        except StoreError as error:
            failure = error
        if failure is not None:
            if not isinstance(failure, StoreRefusedError):
                self._note_failure(failure)
            whose = "this model" if tenant is None else "the salt"
            raise StoreError(
                f"{self.address}: expected all that {whose} has in the store to be deleted, got less: {failure}; this"
                " server uses none of it, but others may: delete it again when the store answers"
            ) from failure
        with self._lock:
            if self._undeleted.get(tenant) == asked:  # otherwise it was asked for again meanwhile
                self._undeleted.pop(tenant, None)
        return number

    def _mark(self, tenant: str | None, end_s: float) -> tuple[StoreError | None, bool]:
        """Leave a tombstone. Return the failure, and whether it is there: a store that is full refuses it."""
        mark: Command = ("SET", self._names.tombstone(tenant), token_hex(8), "PX", TOMBSTONE_MS)
        try:
            (answer,) = self._stores.run([mark], min(self.address.timeout_s, max(0.0, end_s - time.monotonic())))
        except StoreError as error:
            return error, False
        return None, not isinstance(answer, StoreError)

    def _delete_keys(self, tenant: str | None, end_s: float) -> int:
        return self._stores.delete_matching(self._names.patterns(tenant), max(0.0, end_s - time.monotonic()))

    def _is_forbidden(self, tenant: str) -> bool:
        with self._lock:
            return tenant in self._undeleted or None in self._undeleted

    # Coming back.

    def seconds_to_probe(self) -> float | None:
        """Return how many seconds remain until `probe` should be called; None if it needn't be called."""
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
        """Close the clients without waiting. Calls in progress fail."""
        for client in (self._lookups, self._loads, self._stores):
            client.close()

    # Helpers.

    def _worth_asking(self, names: Sequence[Sequence[str]]) -> list[str]:
        """Return the keys of blocks, each once, without those whose bad values couldn't be deleted a while ago."""
        with self._lock:
            if self._shunned:
                now_s = time.monotonic()
                self._shunned = {key: until_s for key, until_s in self._shunned.items() if until_s > now_s}
            return [key for key in dict.fromkeys(chain(*names)) if key not in self._shunned]

    def _tombstones(self, tenant: str) -> list[bytes | None]:
        """Return when a tenant, and everything, was deleted: each a token, None for never. b"": it isn't known."""
        commands: list[Command] = [("GET", self._names.tombstone(one)) for one in (tenant, None)]
        answers = self._stores.run(commands, self.address.timeout_s)
        return [answer if answer is None or isinstance(answer, bytes) else b"" for answer in answers]

    def _was_deleted(self, tenant: str, seen: list[bytes | None]) -> bool:
        """Whether a tenant was deleted since `_tombstones` returned `seen`. A tombstone that expired is no deletion.

        If the tombstone's node was gone before, and still is, then nobody can have deleted the tenant without an error.
        """
        found = self._tombstones(tenant)
        return any(now is not None and now != then for now, then in zip(found, seen, strict=True))

    def _keep_quota(
        self, tenant: str, owner: Owner, digests: Sequence[bytes], first: int, before: Sequence[bytes]
    ) -> frozenset[bytes] | None:
        """Make room for blocks under a quota. Return those beyond it; None if nothing is to be written."""
        given = digests if owner.max_blocks else ()
        try:
            gone = self._quotas.admit(tenant, owner.max_blocks or 0, given, first, before)
        except StoreRefusedError as error:
            self._note_refused([error])
            self._count(num_refused_blocks=len(digests))
            return None
        self._count(num_trimmed_blocks=len(set(gone or ()).difference(given)))
        return frozenset(gone) if gone is not None and owner.max_blocks else None

    def _claim(self, keys: Sequence[str], wanted: list[int], token: str) -> tuple[list[int], int]:
        """Claim blocks that the store lacks. Return the numbers of those to write, and how many the store refused.

        A block is looked up again after it was claimed: another client may have written it just before.
        """
        if not wanted:
            return [], 0
        touched = self._stores.run([("TOUCH", keys[number]) for number in wanted], self.address.timeout_s)
        absent = [number for number, answer in zip(wanted, touched, strict=True) if answer == 0]
        num_refused = self._note_refused(touched)
        claims: list[Command] = [
            ("SET", self._names.claim(keys[number]), token, "NX", "PX", CLAIM_MS) for number in absent
        ]
        answers = self._stores.run(claims, self.address.timeout_s) if claims else []
        num_refused += self._note_refused(answers)
        claimed = [number for number, answer in zip(absent, answers, strict=True) if answer is True]
        # Not in the same call, whose commands several connections carry out in any order.
        lookups: list[Command] = [("TOUCH", keys[number]) for number in claimed]
        touched = self._stores.run(lookups, self.address.timeout_s) if lookups else []
        lacking = [number for number, answer in zip(claimed, touched, strict=True) if answer == 0]
        return lacking, num_refused

    def _give_up(self, keys: Sequence[str], token: str) -> None:
        """Give back claims, so that others needn't wait until they expire."""
        commands: list[Command] = [
            ("EVAL", DELETE_VALUE, 1, self._names.claim(key), _sha1(token.encode())) for key in keys
        ]
        if commands:
            self._stores.run(commands, self.address.timeout_s)

    def _put(self, values: Mapping[str, bytes], token: str) -> list[Any]:
        """Write claimed blocks. Return 1 for each that was written, 0 for one whose claim is gone, or a StoreError."""
        life = "" if self.address.ttl_s is None else self.address.ttl_s
        commands: list[Command] = [
            ("EVAL", WRITE, 2, self._names.claim(key), key, token, life, value) for key, value in values.items()
        ]
        return self._stores.run(commands, self._seconds_for(sum(map(len, values.values())))) if commands else []

    def _note_written(self, values: Mapping[int, bytes], answers: Sequence[Any]) -> int:
        """Count what was written, and return how many blocks the store refused."""
        written = [value for value, answer in zip(values.values(), answers, strict=True) if answer == 1]
        self._count(num_written_blocks=len(written), num_written_bytes=sum(map(len, written)))
        return self._note_refused(answers)

    def _delete_bad(self, tenant: str, identities: Sequence[BlockIdentity], values: Sequence[Any]) -> None:
        """Delete blocks whose values are bad, so that they are written again. Other values under their names stay.

        What can't be deleted is not looked up for a while, since a lookup would renew it.
        """
        keys = [self._names.block(tenant, identity.digest()) for identity in identities]
        commands: list[Command] = [
            ("EVAL", DELETE_VALUE, 1, key, _sha1(value)) for key, value in zip(keys, values, strict=True)
        ]
        answers: list[Any] = [None] * len(keys)
        with suppress(StoreError), self._calling():
            answers = self._loads.run(commands, self.address.timeout_s)
        self._note_refused(answers)
        until_s = time.monotonic() + SHUN_S
        with self._lock:
            for key, answer in zip(keys, answers, strict=True):
                if not isinstance(answer, int):
                    self._shunned[key] = until_s
            while len(self._shunned) > MOST_LOOKUPS:
                del self._shunned[next(iter(self._shunned))]

    def _seal(self, identity: BlockIdentity, payload: Payload) -> bytes:
        return b"".join((self._sealer.seal(identity, payload), payload))

    def _open(self, value: Any, identity: BlockIdentity) -> memoryview | None:
        """Return the payload of a value; None if it isn't this block's."""
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
        """Guard calls of the store. While it is away, raises StoreError and makes no call. moves: blocks' bytes."""
        with self._lock:
            is_away = self._breaker.is_open
            if is_away:
                self._count_locked(num_skipped=1)
        if is_away:
            raise StoreError(f"{self.address}: expected a store that answers, got one that failed a moment ago")
        try:
            yield
        except StoreRefusedError:
            raise  # it answers
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


class Breaker:
    """A circuit breaker: it opens with a failure, and closes when a probe, which the caller makes, succeeds.

    This way a store that fails delays one call only. The pause doubles with each failure, up to MOST_PAUSE_S, and half
    of it is random, so that servers don't come back all at once. Not thread-safe. clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float], draw: Callable[[], float] = random.random) -> None:
        self._clock = clock
        self._draw = draw
        self._pause_s = 0.0
        self._until: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the store must not be called."""
        return self._until is not None

    def note_failure(self) -> None:
        """Record that the store failed. Of several failures at one moment only the first counts."""
        if self._until is not None and self._clock() < self._until:
            return
        self._pause_s = min(MOST_PAUSE_S, self._pause_s * 2 or FIRST_PAUSE_S)
        self._until = self._clock() + self._pause_s * (1 + self._draw()) / 2

    def note_answer(self) -> None:
        """Record that a probe was answered. The pause stays as it is, since the store may fail again under load."""
        self._until = None

    def note_success(self) -> None:
        """Record that the store does its work again. The next pause is the shortest one."""
        self._until, self._pause_s = None, 0.0

    def seconds_to_probe(self) -> float | None:
        """Return how long it is until the next probe; None if the breaker is closed."""
        return None if self._until is None else max(0.0, self._until - self._clock())


def _is_bad(value: Any) -> bool:
    """Whether an answer that isn't the block is a bad value (a list or another type, too) rather than none."""
    return isinstance(value, bytes) or (isinstance(value, StoreRefusedError) and "WRONGTYPE" in str(value))


def _sha1(value: Any) -> str:
    return sha1(value, usedforsecurity=False).hexdigest() if isinstance(value, bytes) else ""
