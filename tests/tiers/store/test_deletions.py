"""Deleting a tenant in a store that others write to: all of it, or an error that says what is left."""

import os
import signal
import threading
import time

import pytest
from tiers.store.servers import cluster, cluster_url, proxied, running
from tiers.store.test_store import (
    QUICK,
    SIZE,
    answer_of,
    chain,
    come_back,
    connect,
    finds,
    keys_of,
    module_server,
    put,
    read,
    server,
    took,
)

from kvblocks.tiers.sealing import Sealer
from kvblocks.tiers.store import SharedStore, StoreError
from kvblocks.tiers.store.names import StoreNames
from kvblocks.tiers.store.store import Owner

__all__ = ["connect", "module_server", "server"]  # fixtures

ANN = Owner("ann")


def test_a_tenant_that_could_not_be_deleted_is_not_used_before_it_is(server, connect):
    with proxied(server) as proxy:
        store = connect(proxy.url)
        identities, payloads = chain(2)
        store.write(Owner("ann"), identities, payloads)
        store.write(Owner("bob"), identities, payloads)
        proxy.refuses = True
        proxy.cut_all()
        with pytest.raises(StoreError):
            store.forget("ann", 5.0)
        proxy.refuses = False
        come_back(store)
        assert (finds(store, identities, "ann"), finds(store, identities, "bob")) == ([False] * 2, [True] * 2)
        assert not store.write(Owner("ann"), identities, payloads)
        with pytest.raises(StoreError, match="to be deleted"):
            store.read("ann", identities, SIZE)
        assert store.forget("ann", 20.0) == 2
        assert store.write(Owner("ann"), identities, payloads) and read(store, identities, "ann") == payloads


def test_a_reset_during_a_deletion_asks_for_another_one(server, connect, monkeypatch):
    store = connect(server.url)
    identities, payloads = chain(2)
    assert store.write(Owner(None), identities, payloads)
    client = store._stores  # noqa: SLF001
    delete = client.delete_matching

    def reset_meanwhile(patterns, timeout_s):
        number = delete(patterns, timeout_s)
        store.forbid_all()
        return number

    monkeypatch.setattr(client, "delete_matching", reset_meanwhile)
    assert store.forget_all(5.0) >= 2
    assert not store.write(Owner(None), identities, payloads)  # not before the second one was carried out
    monkeypatch.undo()
    store.forget_all(5.0)
    assert store.write(Owner(None), identities, payloads)


@pytest.mark.parametrize("answer", [b"", 7, [b"0"], [b"x", []]])
def test_a_damaged_answer_to_a_deletion_is_a_failure_that_says_so(server, connect, monkeypatch, answer):
    store = connect(server.url)
    monkeypatch.setattr(store._stores, "_run_part", lambda node, commands, end_s: [answer])  # noqa: SLF001
    with pytest.raises(StoreError):
        store.forget_all(5.0)


# --- others that write -----------------------------------------------------------------------------------------------


LIMITED = Owner("ann", 10)


@pytest.mark.parametrize("whole", [False, True], ids=["a tenant", "everything"])
@pytest.mark.parametrize(
    ("step", "owner"),
    [
        ("_keep_quota", LIMITED),
        *((step, owner) for step in ("_claim", "_was_deleted", "_put") for owner in (ANN, LIMITED)),
    ],
)
def test_a_slow_writer_leaves_nothing_behind_a_deletion(server, connect, monkeypatch, step, whole, owner):
    """It stops before it makes room, before it claims blocks, when it has claimed them, and before it sends them."""
    writer, other = connect(server.url), connect(server.url)
    identities, payloads = chain(6)
    reached, may_go_on = threading.Event(), threading.Event()
    plain = getattr(SharedStore, step)

    def slow(store, *given):
        reached.set()
        assert may_go_on.wait(60)
        return plain(store, *given)

    monkeypatch.setattr(SharedStore, step, slow)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(writer.write(owner, identities, payloads)))
    thread.start()
    assert reached.wait(60)
    monkeypatch.undo()
    if whole:
        other.forget_all(20.0)
    else:
        other.forget("ann", 20.0)
    assert keys_of(server) == []
    may_go_on.set()
    thread.join(60)
    left = keys_of(server)
    assert answers == [False]
    assert all(key.endswith(b":q") and server.client().zrange(key, 0, -1) == [b""] for key in left), (
        "no digest, no block"
    )
    assert writer.write(owner, identities, payloads)
    assert read(other, identities, "ann") == payloads, "what comes later is stored"


def test_what_is_written_between_a_scan_and_its_deletion_is_deleted_too(server, connect, monkeypatch):
    """The scan has passed the place of the blocks, and has the claims, when the writer sends."""
    writer, other = connect(server.url), connect(server.url)
    identities, payloads = chain(6)
    reached, may_go_on = threading.Event(), threading.Event()
    put = SharedStore._put  # noqa: SLF001

    def slow(store, *given):
        reached.set()
        assert may_go_on.wait(60)
        return put(store, *given)

    monkeypatch.setattr(SharedStore, "_put", slow)
    thread = threading.Thread(target=lambda: writer.write(ANN, identities, payloads))
    thread.start()
    assert reached.wait(60)
    client = other._stores  # noqa: SLF001
    run = client._run_soon  # noqa: SLF001

    def write_first(node, commands, end_s):
        if commands[0][0] == "UNLINK":
            may_go_on.set()
            thread.join(60)
        return run(node, commands, end_s)

    monkeypatch.setattr(client, "_run_soon", write_first)
    other.forget("ann", 20.0)
    assert may_go_on.is_set() and writer.stats.num_written_blocks == 6 and keys_of(server) == []


def test_a_writer_whose_claims_were_taken_by_a_deletion_sends_nothing_twice(server, connect, monkeypatch):
    """A deletion of another tenant meanwhile changes nothing."""
    writer, other = connect(server.url), connect(server.url)
    identities, payloads = chain(4)
    other.write(Owner("bob"), identities, payloads)
    plain = SharedStore._put  # noqa: SLF001

    def forget_first(store, *given):
        assert other.forget("bob", 20.0) == 4
        return plain(store, *given)

    monkeypatch.setattr(SharedStore, "_put", forget_first)
    assert writer.write(ANN, identities, payloads) and writer.stats.num_written_blocks == 4
    assert read(other, identities, "ann") == payloads


def test_a_claim_that_the_store_evicted_is_made_again(server, connect, monkeypatch):
    store = connect(server.url)
    identities, payloads = chain(4)
    names = StoreNames(Sealer(bytes(32)))
    plain, lost = SharedStore._put, []  # noqa: SLF001

    def evict_first(one, values, token):
        if len(lost) < 2:
            lost.append(next(iter(values)))
            server.client().delete(names.claim(lost[-1]))
        return plain(one, values, token)

    monkeypatch.setattr(SharedStore, "_put", evict_first)
    assert store.write(ANN, identities, payloads) and len(lost) == 2
    assert read(store, identities, "ann") == payloads
    assert (store.stats.num_written_blocks, store.stats.num_present_blocks) == (4, 0)


def test_a_tombstone_ends_by_itself(server, connect):
    connect(server.url).forget("ann", 20.0)
    (stone,) = server.client().keys()
    assert 23 * 3600 < server.client().ttl(stone) <= 24 * 3600 and server.client().get(stone)


# --- stores that fail ------------------------------------------------------------------------------------------------


def pid_of(server):
    return server.client().info("server")["process_id"]


def test_a_deletion_in_a_store_that_hangs_ends_soon_and_says_what_to_do(tmp_path, connect):
    identities, payloads = chain(4)
    with running(tmp_path) as server:
        store = connect(server.url, options=QUICK)
        put(store, ANN, identities, payloads)
        pid, num_failures = pid_of(server), store.stats.num_failures
        os.kill(pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            with pytest.raises(StoreError) as raised:
                store.forget("ann", 60.0)
            assert time.monotonic() - start < 30.0
            message = str(raised.value)
            assert "expected all that the salt has in the store to be deleted, got less: " in message
            assert "; this server uses none of it, but others may: delete it again when the store answers" in message
            assert store.is_away and store.stats.num_failures == num_failures + 1, "it counts"
            assert finds(store, identities, "ann") == [False] * 4
        finally:
            os.kill(pid, signal.SIGCONT)
        come_back(store)
        assert finds(store, identities, "ann") == [False] * 4, "not before it is deleted"
        assert keys_of(server)
        answer_of(store, store.forget, "ann", 20.0)
        assert keys_of(server) == []
        put(store, ANN, identities, payloads)


def test_a_deletion_in_a_store_that_trickles_ends_soon(server, connect):
    """Each byte comes in time, and the answer never does."""
    connect(server.url).write(ANN, *chain(10))
    with proxied(server) as proxy:
        store = connect(proxy.url, options=QUICK)
        come_back(store)
        proxy.piece, proxy.delay_s = 1, 0.1
        start = time.monotonic()
        with pytest.raises(StoreError):
            store.forget("ann", 60.0)
        assert time.monotonic() - start < 30.0


def test_an_index_that_goes_while_it_is_made_stops_the_writer(server, connect, monkeypatch):
    """As a deletion does that comes at this moment."""
    store = connect(server.url)
    identities, payloads = chain(4)
    quotas = store._quotas  # noqa: SLF001
    plain = quotas._make_index  # noqa: SLF001

    def make_and_lose(tenant, index):
        plain(tenant, index)
        server.client().delete(index)

    with monkeypatch.context() as patch:
        patch.setattr(quotas, "_make_index", make_and_lose)
        assert not store.write(LIMITED, identities, payloads)
    assert keys_of(server) == [] and store.stats.num_failures == 0
    assert store.write(LIMITED, identities, payloads)


def test_a_refusal_is_an_error_and_no_failure_of_the_store(tmp_path, connect):
    with running(tmp_path) as server:
        server.client().execute_command("ACL", "SETUSER", "ann", "on", ">p", "~*", "+@all", "-scan")
        store = connect(f"valkey://ann:p@127.0.0.1:{server.port}")
        with pytest.raises(StoreError, match="no permissions to run the 'scan'"):
            store.forget("ann", 5.0)
        assert not store.is_away and store.stats.num_failures == 0


def test_a_full_store_is_emptied(server, connect):
    """It refuses the tombstone at first."""
    store = connect(server.url)
    identities, payloads = chain(4)
    store.write(ANN, identities, payloads)
    server.client().config_set("maxmemory-policy", "noeviction")
    server.client().config_set("maxmemory", 1)
    assert store.forget("ann", 20.0) == 4 and keys_of(server) == []
    assert took(store.write, ANN, identities, payloads) is False


def has_stone(store, server):
    names = StoreNames(Sealer(bytes(32)))
    slot = server.client().execute_command("CLUSTER KEYSLOT", names.tombstone(names.tenant("ann")))
    node = store._stores._cluster.nodes_manager.get_node_from_slot(slot)  # noqa: SLF001
    return node.port == server.port


def test_in_a_cluster_the_nodes_that_answer_are_deleted_and_the_others_named(tmp_path, connect):
    identities, payloads = chain(60)
    with cluster(tmp_path) as servers:
        store = connect(cluster_url(servers))
        assert store.write(Owner("ann", 100), identities, payloads)
        assert read(store, identities, "ann") == payloads
        (stone,) = (server for server in servers if has_stone(store, server))
        stone.kill()  # also if it is the one that would have the tombstone
        with pytest.raises(StoreError, match=f"some left on 127.0.0.1:{stone.port}"):
            store.forget("ann", 20.0)
        for live in set(servers) - {stone}:
            assert [key for key in keys_of(live) if not key.startswith(b"kvblocks:1:f:")] == []
