"""`SessionsPolicy`: keeps the blocks of sessions that will come back soon, as it learns from their pauses.

Blocks that no session wants any more are evicted first: those that a session's next request did not contain, and those
of ended sessions. Then the policy evicts the blocks of the paused request that is least likely to come back within the
time for which the pool can keep blocks: see `returns`. All requests without a session count as one kind of pause, and
are evicted least recently used first. Without any sessions the policy is therefore LRU.

The unit is a thread: the blocks that one request released, which are wanted together. A session usually has one thread,
and several with sub-agents. A request that hits at least half of a thread's blocks continues the thread; the blocks
that it doesn't hit are superseded. A request that hits fewer (a history was compacted) leaves the thread. Threads that
were left are evicted first too, until some of them have come back. The session's other threads are set aside; if the
request hits none (a sub-agent begins), all of them are. Being left and being set aside are kinds of pauses, and the
policy learns how they end as for any other kind.

A block of several sessions is in the thread of the session that released it last. When that thread is about to lose the
block, or no longer wants it, the block goes to another thread of the session, if all of that thread's blocks come after
it, or else to the thread of another session that had it and hasn't ended. A block that many sessions had goes to a
thread without a session.
"""

from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice, repeat
from math import inf
from operator import is_
from typing import Final, final

from kvblocks.closed import Closed
from kvblocks.retention.policies.policy import CacheView, FreeBlock
from kvblocks.retention.policies.returns import Rhythm
from kvblocks.retention.policies.threads import PauseKind, Session, SessionKey, Thread

_MAX_REASONS: Final = 32  # different reasons; all further ones count as one kind
_MANY: Final = 7  # other sessions: the most that `FreeBlock.others` has
_MOST_HEIRS: Final = 8  # the newest threads of the same session that may get a block
_SHORTEST: Final = 256  # shorter pauses count as 1/256 of the time for which the pool keeps blocks
_ADAPTING: Final = 50  # that time is averaged over so many victims
_HORIZON: Final = 2.0  # how far to look ahead, in multiples of that time


@final
class SessionsPolicy(Closed):
    """Evicts blocks that no session wants, then those least likely to be wanted soon."""

    def __init__(self, cache: CacheView) -> None:
        self._cache = cache
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        self._unwanted: OrderedDict[int, None] = OrderedDict()
        self._threads: dict[int, Thread] = {}  # by block id: the one that has it, or had it last
        self._others: dict[int, tuple[Hashable, ...]] = {}
        self._tenants: dict[int, str | None] = {}  # of the blocks in `_others`
        self._without, self._rest, self._aside, self._left = (
            PauseKind(),
            PauseKind(),
            PauseKind(),
            PauseKind(recency_weight=0.0),
        )
        self._kinds: dict[str, PauseKind] = {}
        self._starting: Session | None = None
        self._used: dict[Thread, list[int]] = {}  # by thread: blocks that the starting request uses
        self._num_pauses = 0
        self._kept = 0.0  # mean time for which evicted blocks were kept; 0: not known yet
        self._num_victims = 0
        self._victim: Thread | None = None
        self._chosen_at: float = 0.0

    # Calls that tell.

    def begin(self, session: Hashable, tenant: str | None) -> None:
        """Watch from now on which of the session's threads the request uses. O(threads of the last one to begin)."""
        self._settle()
        self._starting = self._find(tenant, session)
        self._starting.has_ended = False
        self._starting.began = self._cache.now

    def free(self, blocks: list[FreeBlock]) -> None:
        """Make the blocks a thread, or put them into the one that the request continued. O(blocks)."""
        self._settle()
        if not blocks:
            return
        ids, depths, tenants, sessions, _, others = zip(*blocks)  # noqa: B905  # by field
        first = 0
        for i in [*_changes(sessions, tenants), len(blocks)]:
            session = None if sessions[first] is None else self._find(tenants[first], sessions[first])
            thread = self._gather(session, ids[first:i], depths[first:i])
            if any(others[first:i]):
                for block_id, each in zip(ids[first:i], others[first:i]):  # noqa: B905  # as many
                    if each:
                        self._others[block_id] = each
                        self._tenants[block_id] = tenants[first]
            first = i
            if session is not None and session.has_ended:
                self._drop(thread)
            else:
                self._pause(thread, self._kind_of(session))

    def use(self, block_ids: list[int]) -> None:
        """Take the blocks out of their threads. O(blocks)."""
        if self._others:
            for block_id in self._others.keys() & block_ids:
                self._forget_others(block_id)
        threads = [*map(self._threads.get, block_ids)]
        thread = threads[0] if threads else None
        if thread is not None and threads.count(thread) == len(threads):  # mostly
            self._use(thread, block_ids)
            return
        for block_id, found in zip(block_ids, threads):  # noqa: B905  # as many
            if found is None:
                self._unwanted.pop(block_id, None)
            else:
                self._use(found, [block_id])

    def _use(self, thread: Thread, block_ids: list[int]) -> None:
        """Take blocks out of the thread that has them, or had them last. O(blocks)."""
        own = thread.blocks
        taken = [block_id for block_id in block_ids if block_id in own]
        for block_id in taken:  # faster than `pop` of an OrderedDict
            del own[block_id]
        if len(taken) < len(block_ids):
            for block_id in block_ids:
                self._unwanted.pop(block_id, None)
            if not taken:
                return
        if not thread.blocks:
            self._note_empty(thread)
        session = thread.session
        if session is None:
            if thread.is_open:  # its pause has ended; the blocks that aren't used stay in it
                self._learn(thread)
                self._close(thread)
        elif session is self._starting:
            self._used.setdefault(thread, []).extend(taken)

    def remove(self, block_ids: list[int]) -> None:
        """Forget the blocks. O(blocks)."""
        if self._others:
            for block_id in block_ids:
                self._forget_others(block_id)
        for block_id in block_ids:
            thread = self._threads.pop(block_id, None)
            if thread is None or block_id not in thread.blocks:
                self._unwanted.pop(block_id, None)
            else:
                del thread.blocks[block_id]
                if not thread.blocks:
                    self._note_empty(thread)

    def pause(self, session: Hashable, tenant: str | None, reason: str) -> None:
        """Rank the session's last thread by the reason. O(1) on average."""
        self._settle()
        found = self._find(tenant, session)
        found.reason = reason
        if found.last is not None and found.last.kind is not None:
            self._pause(found.last, self._kind_of(found), is_new=False)

    def end(self, session: Hashable, tenant: str | None) -> None:
        """Make the session's blocks unwanted, except those that other sessions want. O(blocks of the session)."""
        self._settle()
        found = self._sessions.get((tenant, session))
        if found is not None:
            found.has_ended = True
            for thread in [*found.threads]:
                self._drop(thread)
                self._resume(thread)
            found.threads.clear()
            found.last = None

    # Calls that ask.

    def victim(self, num_blocks: int) -> int | None:
        """Return an unwanted block if there is one, otherwise a block near the end of the thread that is worth the
        least.

        Choosing a thread costs O(kinds of pauses x rhythms). It is done once for each value of the clock and whenever
        the chosen thread is used up. Otherwise O(blocks evicted).
        """
        self._settle()
        while True:
            if self._unwanted:
                return next(iter(self._unwanted))
            thread = self._victim
            if thread is None or not thread.blocks or thread.kind is None or self._chosen_at != self._cache.now:
                thread = self._victim = self._choose()
                self._chosen_at = self._cache.now
            if thread is None:
                return None
            block_id, depth = next(iter(thread.blocks.items()))
            heir = self._heir(thread, block_id, depth)
            if heir is None:
                return self._end_of(thread, block_id, num_blocks)
            self._move(block_id, depth, heir)

    def _choose(self) -> Thread | None:
        """Return the thread that is worth the least; among equal ones, the one that has paused longest."""
        now, found = self._cache.now, None
        least, first = inf, 0
        for kind in (self._left, self._without, self._rest, self._aside, *self._kinds.values()):
            for rhythm, paused in [*kind.paused.items()]:
                if not paused:
                    del kind.paused[rhythm]
                    continue
                # As a pause grows, its worth rises while most pauses are longer, and falls after that. So the thread
                # that is worth the least is the first or the last. Without sessions only the first is considered.
                ends = [next(iter(paused))]
                if len(paused) > 1 and kind is not self._without:
                    ends.append(next(reversed(paused)))
                for thread in ends:
                    worth = self._worth(thread, kind, now)
                    if found is None or worth < least or (worth == least and thread.number < first):
                        found, least, first = thread, worth, thread.number
        if found is not None:
            self._num_victims += 1
            share = 1.0 / min(self._num_victims, _ADAPTING)
            self._kept += (max(0.0, float(now - found.since)) - self._kept) * share
        return found

    def _worth(self, thread: Thread, kind: PauseKind, now: float) -> float:
        if self._kept <= 0.0:  # the clock stood still, or nothing was evicted yet
            return 0.0 if kind is self._left else 0.5
        lasted = max(float(now - thread.since), self._kept / _SHORTEST)
        return kind.returns.worth(lasted, _HORIZON * self._kept, self._rhythm_of(thread, kind))

    def _rhythm_of(self, thread: Thread, kind: PauseKind) -> float:
        """Return the rhythm of a thread's pause; without sessions all threads have the same."""
        return kind.returns.rhythm(None, 0.0) if kind is self._without else thread.rhythm

    def _end_of(self, thread: Thread, block_id: int, num_blocks: int) -> int:
        """Return the first of a thread's last `num_blocks` blocks, or of fewer if others may want some of them."""
        session = thread.session
        if num_blocks == 1 or session is None or len(session.threads) > 1:
            return block_id
        before = 0
        for each, depth in islice(thread.blocks.items(), num_blocks):
            if each in self._others or (before and depth != before - 1):
                break
            block_id, before = each, depth
        return block_id

    # Who wants a block.

    def _heir(self, thread: Thread, block_id: int, depth: int) -> Thread | None:
        """Return another thread that wants a block, None if there is none."""
        session = thread.session
        if session is not None and len(session.threads) > 1:
            for other in islice(reversed(session.threads), _MOST_HEIRS):
                if other is not thread and other.blocks and depth < next(reversed(other.blocks.values())):
                    return other
        others = self._others.get(block_id, ())
        if not others:
            return None
        if len(others) >= _MANY:
            self._forget_others(block_id)
            return self._nobody()
        tenant = self._tenants[block_id]
        for i in range(len(others) - 1, -1, -1):
            if others[i] is None:
                self._keep_others(block_id, others[:i])
                return self._nobody()
            other_session = self._sessions.get((tenant, others[i]))
            if other_session is not None and other_session is not session:
                heir = other_session.last
                if heir is not None:
                    self._keep_others(block_id, others[:i])
                    return heir
        self._forget_others(block_id)
        return None

    def _nobody(self) -> Thread:
        """Return a new thread without a session. Its pause begins now."""
        thread = Thread(None)
        self._pause(thread, self._without)
        return thread

    def _drop(self, thread: Thread) -> None:
        """Make a thread's blocks unwanted, except those that other threads want. O(blocks)."""
        for block_id, depth in [*thread.blocks.items()]:
            heir = self._heir(thread, block_id, depth)
            if heir is None:
                del thread.blocks[block_id]
                del self._threads[block_id]
                self._unwanted[block_id] = None
            else:
                self._move(block_id, depth, heir)

    def _move(self, block_id: int, depth: int, heir: Thread) -> None:
        self._leave(block_id)
        self._threads[block_id] = heir
        heir.blocks[block_id] = depth
        if heir.kind is not None:
            heir.kind.paused.setdefault(heir.rhythm, OrderedDict()).setdefault(heir, None)

    def _keep_others(self, block_id: int, others: tuple[Hashable, ...]) -> None:
        if others:
            self._others[block_id] = others
        else:
            self._forget_others(block_id)

    def _forget_others(self, block_id: int) -> None:
        self._others.pop(block_id, None)
        self._tenants.pop(block_id, None)

    # Threads, and when they pause.

    def _settle(self) -> None:
        """Decide which thread the latest request continues. By now `use` has told of all blocks that it hit."""
        session, self._starting = self._starting, None
        if session is None:
            return
        used, self._used = self._used, {}
        session.reason = None
        last = session.last
        if used:
            thread = max(used, key=lambda each: len(used[each]))
            if len(used[thread]) < len(thread.blocks):
                self._pause(thread, self._left)
                thread = self._part(session, used[thread])
            else:
                self._continue(thread)
            session.last = thread
        elif last is not None and not last.blocks:  # all of it was evicted
            self._continue(last)
        else:
            session.last = None
        for thread in [*session.waiting]:
            if thread.blocks:
                self._pause(thread, self._aside)
            else:
                self._resume(thread)
                session.threads.pop(thread, None)

    def _continue(self, thread: Thread) -> None:
        """Note that a thread's next request has begun. O(blocks that the request didn't hit)."""
        self._learn(thread)
        self._drop(thread)
        self._resume(thread)

    def _part(self, session: Session, block_ids: list[int]) -> Thread:
        """Return a new thread of a session, for blocks that are in use now. O(blocks)."""
        thread = Thread(session)
        session.threads[thread] = None
        for block_id in block_ids:
            self._threads[block_id] = thread
        return thread

    def _gather(self, session: Session | None, ids: tuple[int, ...], depths: tuple[int, ...]) -> Thread:
        """Put blocks that one sequence released into a thread. Returns the thread."""
        found: Thread | None = None
        if session is not None:
            for block_id in ids:
                known = self._threads.get(block_id)
                if known is not None and known.session is session and known in session.threads:
                    found = known
                    break
        thread = Thread(session) if found is None else found
        own = thread.blocks
        for block_id, depth in zip(ids, depths):  # noqa: B905  # faster than `update`
            own[block_id] = depth
        self._threads.update(dict.fromkeys(ids, thread))
        if session is not None:
            took = 0.0 if session.began is None else float(self._cache.now - session.began)
            thread.took = max(took, self._kept / _SHORTEST) if took > 0.0 else 0.0
            self._replace_last(session, thread)
            session.threads[thread] = None
        return thread

    def _replace_last(self, session: Session, thread: Thread | None) -> None:
        """Set the thread of a session's last request. The one before is forgotten if it has no blocks."""
        before, session.last = session.last, thread
        if before is not None and before is not thread and not before.blocks:
            self._resume(before)
            session.threads.pop(before, None)

    def _leave(self, block_id: int) -> Thread | None:
        """Take a block out of its thread. Returns the thread, None if the block was in none."""
        if self._others:
            self._forget_others(block_id)
        thread = self._threads.get(block_id)
        if thread is None or block_id not in thread.blocks:
            self._unwanted.pop(block_id, None)
            return None
        del thread.blocks[block_id]
        if not thread.blocks:
            self._note_empty(thread)
        return thread

    def _note_empty(self, thread: Thread) -> None:
        """A thread has lost its last block."""
        if thread.kind is not None:
            thread.kind.paused[thread.rhythm].pop(thread, None)
        session = thread.session
        if session is not None and session.last is not thread and session is not self._starting:
            session.threads.pop(thread, None)

    def _kind_of(self, session: Session | None) -> PauseKind:
        if session is None:
            return self._without
        reason = session.reason or ""
        if reason not in self._kinds:
            if len(self._kinds) >= _MAX_REASONS:
                return self._rest
            self._kinds[reason] = PauseKind()
        return self._kinds[reason]

    def _pause(self, thread: Thread, kind: PauseKind, *, is_new: bool = True) -> None:
        """Begin a thread's pause of this kind. is_new: False if the pause has begun already, and changes its kind."""
        self._resume(thread)
        session = thread.session
        thread.kind = kind
        thread.rhythm = 0.0 if session is None else kind.returns.rhythm(session.rhythms.get(kind), thread.took)
        kind.returns.num_open += 1.0
        thread.is_open = True
        if session is not None and kind is not self._aside and kind is not self._left:
            session.waiting[thread] = None
        if is_new:
            self._num_pauses += 1
            thread.since, thread.number = self._cache.now, self._num_pauses
        if thread.blocks:
            kind.paused.setdefault(thread.rhythm, OrderedDict())[thread] = None

    def _learn(self, thread: Thread) -> None:
        """Learn from the pause of a thread that comes back.

        The pause ended when the session's request began, which was some calls ago. Without a session it ends now.
        """
        kind, session = thread.kind, thread.session
        back = self._cache.now if session is None or session.began is None else session.began
        lasted = max(float(back - thread.since), self._kept / _SHORTEST)
        if kind is not None and lasted > 0.0:
            own = None if session is None else session.rhythms.setdefault(kind, Rhythm())
            kind.returns.learn(lasted, thread.took, self._rhythm_of(thread, kind), own)

    def _resume(self, thread: Thread) -> None:
        """End a thread's pause, if it pauses."""
        kind = thread.kind
        if kind is not None:
            self._close(thread)
            if thread.session is not None:
                thread.session.waiting.pop(thread, None)
            if thread.rhythm in kind.paused:
                kind.paused[thread.rhythm].pop(thread, None)
            thread.kind = None

    def _close(self, thread: Thread) -> None:
        """Stop expecting a thread's return."""
        if thread.is_open and thread.kind is not None:
            thread.kind.returns.close()
        thread.is_open = False

    def _find(self, tenant: str | None, session: Hashable) -> Session:
        """Return a session; make it if it is new. Then old sessions without blocks may be forgotten."""
        key = tenant, session
        found = self._sessions.get(key)
        if found is None:
            found = self._sessions[key] = Session(key)
            most = 2 * self._cache.num_blocks + 64
            for _ in range(8):  # with more sessions than that, at least half have no blocks
                if len(self._sessions) <= most:
                    break
                oldest = next(iter(self._sessions))
                if any(thread.blocks for thread in self._sessions[oldest].threads) or oldest == key:
                    self._sessions.move_to_end(oldest)
                else:
                    del self._sessions[oldest]
        else:
            self._sessions.move_to_end(key)
        return found


def _changes(sessions: tuple[Hashable, ...], tenants: tuple[str | None, ...]) -> list[int]:
    """Return the indices of blocks whose session or tenant differs from that of the block before."""
    session, tenant = sessions[0], tenants[0]
    if all(map(is_, sessions, repeat(session))) and tenants.count(tenant) == len(tenants):  # mostly
        return []
    found: list[int] = []
    for i in range(len(sessions)):
        if sessions[i] is not session or tenants[i] != tenant:
            found.append(i)
            session, tenant = sessions[i], tenants[i]
    return found
