"""Quotas of tenants in a whole store: whoever stored it, whatever servers' clocks say, also without the index."""

import time

import pytest
from tiers.store.servers import running, wait_for
from tiers.store.test_store import PATIENT, chain, connect, finds, module_server, server

from kvblocks.tiers.sealing import Sealer
from kvblocks.tiers.store import SharedStore, StoreError, quotas
from kvblocks.tiers.store.names import StoreNames
from kvblocks.tiers.store.store import Owner

__all__ = ["connect", "module_server", "server"]  # fixtures

NAMES = StoreNames(Sealer(bytes(32)))
INDEX = NAMES.index(NAMES.tenant("ann"))
A_MOMENT = 0.11  # what is used later is told apart by tenths of a second


def num_blocks(server, salt="ann"):
    return len(server.client().keys(f"{NAMES.tenant(salt)}:" + "?" * 64))


def touch(store, owner, identities):
    return store.touch(owner, [identity.digest() for identity in identities])


def test_a_quota_holds_in_the_whole_store_and_the_ends_go_first(server, connect):
    one, other = connect(server.url), connect(server.url)
    first, payloads = chain(10)
    owner = Owner("ann", 15)
    one.write(owner, first, payloads)
    second, _ = chain(10, first=100)
    time.sleep(A_MOMENT)
    other.write(owner, second, payloads)
    assert sum(finds(one, second, "ann")) == 10
    assert finds(one, first, "ann") == [True] * 5 + [False] * 5, "the older prefix, from its end"
    assert one.stats.num_trimmed_blocks + other.stats.num_trimmed_blocks == 5
    one.write(Owner("bob", 0), first, payloads)
    assert not any(finds(one, first, "bob"))


def test_a_quota_that_was_lowered_to_nothing_deletes_what_is_there(server, connect):
    identities, payloads = chain(6)
    store = connect(server.url)
    assert store.write(Owner("ann", 10), identities, payloads)
    assert not store.write(Owner("ann", 0), identities[:1], payloads[:1])
    assert finds(store, identities, "ann") == [False] * 6 and store.stats.num_trimmed_blocks == 6
    assert not store.write(Owner("ann", 0), identities[:1], payloads[:1]) and store.stats.num_failures == 0


def test_what_comes_before_is_spared_with_what_is_stored_behind_it(server, connect):
    store = connect(server.url)
    long, payloads = chain(12)
    other, _ = chain(4, first=100)
    owner = Owner("ann", 12)
    store.write(owner, long[:6], payloads[:6])
    time.sleep(A_MOMENT)
    store.write(owner, other, payloads[:4])
    time.sleep(A_MOMENT)
    before = [one.digest() for one in long[:6]]
    store.write(owner, long[6:], payloads[6:], 6, before)
    assert finds(store, long, "ann") == [True] * 12 and not any(finds(store, other, "ann"))


def test_what_is_used_stays_and_what_is_not_goes(server, connect):
    """A hit on the device sends no bytes, but counts as a use."""
    one, other = connect(server.url), connect(server.url)
    owner, (first, payloads), (second, _), (third, _) = Owner("ann", 12), chain(4), chain(4, 100), chain(8, 200)
    for identities in (first, second):
        one.write(owner, identities, payloads)
        time.sleep(A_MOMENT)
    assert touch(other, owner, first) == [True] * 4
    time.sleep(A_MOMENT)
    one.write(owner, third, [*payloads, *payloads])
    assert finds(one, first, "ann") == [True] * 4 and not any(finds(one, second, "ann"))
    assert touch(other, owner, second) == [False] * 4
    assert server.client().zscore(INDEX, second[0].digest()) is None, "a block that isn't there doesn't count again"


def test_the_store_s_clock_decides(server, connect, monkeypatch):
    """Of two servers whose clocks differ by an hour, the one that is ahead doesn't win for an hour."""
    ahead, right = connect(server.url), connect(server.url)
    owner, (first, payloads), (second, _) = Owner("ann", 6), chain(4), chain(4, 100)
    plain = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: plain() + 3600)
        ahead.write(owner, first, payloads)
    time.sleep(A_MOMENT)
    right.write(owner, second, payloads)
    assert finds(right, second, "ann") == [True] * 4
    assert finds(right, first, "ann") == [True] * 2 + [False] * 2
    newest = max(score for _, score in server.client().zrange(INDEX, 0, -2, withscores=True)) / 2**18 / 10
    assert abs(newest - plain()) < 60


@pytest.mark.parametrize("ttl", ["", "&ttl_s=1000"])
def test_after_the_store_s_clock_went_back_what_is_new_is_stored(server, connect, ttl):
    """As when it was wrong for a while, or a replica on another machine took over."""
    store, owner = connect(server.url, options=PATIENT + ttl), Owner("ann", 8)
    (first, payloads), (second, _), (third, _) = chain(8), chain(4, 100), chain(4, 200)
    store.write(owner, first, payloads)
    client, day = server.client(), 86400 * 10 * 2**18
    ahead = {digest: score + day for digest, score in client.zrange(INDEX, 0, -2, withscores=True)}
    client.zadd(INDEX, ahead)
    for identities in (second, third):
        assert store.write(owner, identities, payloads[:4])
    assert finds(store, second + third, "ann") == [True] * 8 and not any(finds(store, first, "ann"))
    assert touch(store, owner, second) == [True] * 4
    assert store.write(owner, first[:4], payloads[:4])
    assert finds(store, second, "ann") == [True] * 4 and not any(finds(store, third, "ann"))


def test_an_index_that_was_lost_is_made_again(server, connect):
    one, other = connect(server.url), connect(server.url)
    owner, (first, payloads), (second, _) = Owner("ann", 10), chain(8), chain(6, 100)
    one.write(owner, first, payloads)
    other.write(Owner("bob", 50), first, payloads)
    server.client().delete(INDEX)
    assert other.write(owner, second, payloads[:6])
    assert num_blocks(server) == 10 and finds(other, second, "ann") == [True] * 6
    assert server.client().zcard(INDEX) == 11  # and the entry that says that it is whole
    assert num_blocks(server, "bob") == 8, "of this tenant alone"


def test_an_index_whose_making_was_interrupted_is_not_taken_for_whole(server, connect):
    store = connect(server.url)
    owner, (first, payloads), (second, _) = Owner("ann", 10), chain(8), chain(6, 100)
    store.write(owner, first, payloads)
    server.client().delete(INDEX)
    server.client().zadd(INDEX, {first[0].digest(): 5})
    store.write(owner, second, payloads[:6])
    assert num_blocks(server) == 10


def test_a_server_that_dies_before_it_has_sent_leaves_no_block_uncounted(server, connect, monkeypatch):
    one, other = connect(server.url), connect(server.url)
    owner, (first, payloads), (second, _), (third, _) = Owner("ann", 8), chain(4), chain(4, 100), chain(4, 200)
    plain = SharedStore._put  # noqa: SLF001

    def die_behind(store, values, token):
        plain(store, values, token)
        raise StoreError("as if it had been killed now")

    one.write(owner, first, payloads)
    time.sleep(A_MOMENT)
    with monkeypatch.context() as patch:
        patch.setattr(SharedStore, "_put", die_behind)
        with pytest.raises(StoreError, match="killed"):
            one.write(owner, second, payloads)
    time.sleep(A_MOMENT)
    other.write(owner, third, payloads)
    assert num_blocks(server) == 8
    assert finds(other, second, "ann") == [True] * 4 and not any(finds(other, first, "ann"))


def test_blocks_that_are_used_while_they_are_deleted_are_still_counted(server, connect, monkeypatch):
    """Between the deletion of the blocks and that of their entries, another server stores one of them again."""
    one, other = connect(server.url), connect(server.url)
    owner, (first, payloads), (second, _) = Owner("ann", 4), chain(4), chain(4, 100)
    one.write(owner, first, payloads)
    of_one = one._quotas  # noqa: SLF001
    plain = of_one._unlink  # noqa: SLF001

    def store_again(keys):
        plain(keys)
        monkeypatch.undo()
        time.sleep(A_MOMENT)
        assert other.write(Owner("ann", 8), first[:1], payloads[:1])

    monkeypatch.setattr(of_one, "_unlink", store_again)
    time.sleep(A_MOMENT)
    one.write(owner, second, payloads)
    assert num_blocks(server) == 5
    assert server.client().zscore(INDEX, first[0].digest()) is not None
    other.write(owner, second, payloads)
    assert num_blocks(server) == 4


def test_blocks_that_expired_count_no_more(tmp_path, connect, monkeypatch):
    with running(tmp_path) as server:
        connect(server.url, options=f"{PATIENT}&ttl_s=2").write(Owner("bob", 6), *chain(2))
        assert 55 < server.client().ttl(NAMES.index(NAMES.tenant("bob"))) <= 62, "it outlives its blocks"
        monkeypatch.setattr(quotas, "WRITE_S", 0)
        store = connect(server.url, options=f"{PATIENT}&ttl_s=2")
        owner, (first, payloads), (second, _) = Owner("ann", 6), chain(6), chain(6, 100)
        store.write(owner, first, payloads)
        assert 0 < server.client().pttl(INDEX) <= 2000
        wait_for(lambda: not server.client().exists(INDEX))
        wait_for(lambda: not num_blocks(server))
        store.write(owner, first[:2], payloads[:2])
        time.sleep(1.2)
        store.write(owner, second[:1], payloads[:1])
        time.sleep(1.2)
        store.write(owner, second, payloads)
        assert store.stats.num_trimmed_blocks == 0, "the first two are over, and the third is one of these six"
        assert finds(store, second, "ann") == [True] * 6


def test_without_an_end_an_index_that_had_one_loses_it(server, connect):
    identities, payloads = chain(2)
    connect(server.url, options=f"{PATIENT}&ttl_s=100").write(Owner("ann", 6), identities, payloads)
    connect(server.url).write(Owner("ann", 6), identities, payloads)
    assert server.client().ttl(INDEX) == -1


def test_a_transfer_larger_than_the_quota_stores_its_beginning(server, connect):
    store = connect(server.url)
    identities, payloads = chain(9)
    assert store.write(Owner("ann", 5), identities, payloads)
    assert finds(store, identities, "ann") == [True] * 5 + [False] * 4
    assert store.stats.num_written_blocks == 5, "nothing is sent to be deleted"
