"""`manager.sessions`: which policies are told what, and which calls are refused."""

from typing import Any

import pytest

from kvblocks import CorruptStateError, FreeBlock, InvalidArgumentError, KVCacheManager, Sequence
from kvblocks.retention.policies.lru import LRU


class Listener:
    """LRU that records what it is told of sessions. It wraps `LRU`, since compiled classes can't be derived from."""

    def __init__(self, cache: Any) -> None:
        self.lru = LRU(cache)
        self.use, self.remove, self.victim = self.lru.use, self.lru.remove, self.lru.victim
        self.told: list[Any] = []

    def free(self, blocks: list[FreeBlock]) -> None:
        self.told += [("free", block.block_id, block.session, block.tenant) for block in blocks]
        self.lru.free(blocks)

    def pause(self, session: Any, tenant: str | None, reason: str) -> None:
        self.told.append(("pause", session, tenant, reason))

    def end(self, session: Any, tenant: str | None) -> None:
        self.told.append(("end", session, tenant))


def make(num_blocks: int = 20, policy: type[Listener] = Listener) -> tuple[KVCacheManager, list[Listener]]:
    """A manager of blocks of 4 tokens, and the policies that it made."""
    made: list[Listener] = []

    def factory(cache: Any) -> Listener:
        made.append(policy(cache))
        return made[-1]

    return KVCacheManager(num_blocks, 4, eviction=factory, debug=True), made


def test_a_policy_is_told_whose_blocks_were_given_back() -> None:
    manager, (policy,) = make()
    one = Sequence("one", range(8), session=("chat", 1), salt="mine")
    other = Sequence("other", range(20, 24))
    for sequence in (one, other):
        assert manager.allocate_slots(sequence) is not None
    ids = [*one.block_ids, *other.block_ids]
    manager.free(one)
    manager.free(other)
    manager.sessions.pause(("chat", 1), "tool_use", "mine")
    manager.sessions.end(("chat", 1), salt="mine")
    manager.sessions.end("never heard of")
    assert policy.told == [
        ("free", ids[1], ("chat", 1), "mine"),
        ("free", ids[0], ("chat", 1), "mine"),
        ("free", ids[2], None, None),
        ("pause", ("chat", 1), "mine", "tool_use"),
        ("end", ("chat", 1), "mine"),
        ("end", "never heard of", None),
    ]


@pytest.mark.parametrize("call", ["abort", "truncate", "rewind"])
def test_whatever_gives_blocks_back_says_whose(call: str) -> None:
    manager, (policy,) = make()
    sequence = Sequence("one", range(4), session="chat")
    assert manager.allocate_slots(sequence) is not None
    assert manager.append_slots(sequence, range(4, 12)) is not None
    last = sequence.block_ids[2]
    if call == "abort":
        manager.abort(sequence, 12)
    elif call == "truncate":
        manager.truncate(sequence, 8)
    else:
        child = Sequence("child", range(12), session="another")
        assert manager.allocate_slots(child, hit=manager.get_computed_blocks(child), num_total_tokens=13) is not None
        manager.free(sequence)
        manager.rewind(child, 8)  # its last block was a hit, so it stays cached
        assert policy.told == [("free", last, "another", None)]
        return
    assert policy.told[0] == ("free", last, "chat", None)


def test_a_fork_is_of_the_same_session() -> None:
    manager, _ = make()
    sequence = Sequence("one", range(6), session="chat")
    assert manager.allocate_slots(sequence) is not None
    assert manager.fork(sequence, "child").session == "chat"


def test_a_tenant_s_own_policy_is_told_of_its_sessions_alone() -> None:
    manager, made = make(6)
    manager.quotas.set("mine", 1)
    for number, salt in enumerate(["mine", "mine", None, None]):
        sequence = Sequence(number, range(10 * number, 10 * number + 8), salt=salt, session="chat")
        assert manager.allocate_slots(sequence) is not None
        manager.free(sequence)
    main, own = made
    manager.sessions.pause("chat", "stop", "mine")
    manager.sessions.end("chat")
    assert main.told[-2:] == [("pause", "chat", "mine", "stop"), ("end", "chat", None)]
    assert own.told[-1] == ("pause", "chat", "mine", "stop")


@pytest.mark.parametrize("eviction", [None, "lru"])
def test_where_nobody_listens_nothing_happens(eviction: str | None) -> None:
    manager = KVCacheManager(4, 4, eviction=eviction)
    manager.sessions.pause("chat", "stop")
    manager.sessions.end("chat")
    assert manager.sessions is manager.sessions
    assert manager.stats.num_eviction_failures == 0


def test_what_is_wrong_is_refused() -> None:
    manager, (policy,) = make()
    for session in (None, [], float("nan")):
        with pytest.raises(InvalidArgumentError, match=r"session: expected something .*, got"):
            manager.sessions.pause(session, "stop")
        with pytest.raises(InvalidArgumentError, match=r"session: expected something .*, got"):
            manager.sessions.end(session)
    for reason in (None, "", 3, b"stop"):
        with pytest.raises(InvalidArgumentError, match="reason: expected a non-empty str, got"):
            manager.sessions.pause("chat", reason)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="salt: expected a non-empty str or None, got 3"):
        manager.sessions.end("chat", 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="session: expected something hashable, got"):
        Sequence("one", [1], session=[])  # type: ignore[arg-type]
    assert not policy.told


def test_a_policy_that_raises_is_counted_and_one_that_is_interrupted_is_known() -> None:
    class Raising(Listener):
        error: BaseException = ValueError()

        def pause(self, session: Any, tenant: str | None, reason: str) -> None:
            raise self.error

        end = pause  # it takes an argument too many

    manager, (policy,) = make(policy=Raising)
    manager.sessions.pause("chat", "stop")
    manager.sessions.end("chat")
    assert manager.stats.num_eviction_failures == 2
    manager.check()
    policy.error = KeyboardInterrupt()  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        manager.sessions.pause("chat", "stop")
    with pytest.raises(CorruptStateError):
        manager.sessions.end("chat")


def test_calls_that_are_no_calls_are_refused() -> None:
    class Wrong(Listener):
        end = 3  # type: ignore[assignment]

    with pytest.raises(
        InvalidArgumentError, match="eviction: expected it to make policies whose begin, pause, end can be called"
    ):
        make(policy=Wrong)
