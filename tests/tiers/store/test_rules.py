"""A store's rules, without a server: its address, its keys, and how long it is not called after a failure."""

from fnmatch import fnmatchcase

import pytest

from kvblocks.errors import InvalidArgumentError
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.sealing import Sealer
from kvblocks.tiers.store import parse_address
from kvblocks.tiers.store.names import StoreNames
from kvblocks.tiers.store.store import FIRST_PAUSE_S, MOST_PAUSE_S, Breaker

SECRET = b"sixteen bytes or more"


@pytest.mark.parametrize(
    ("url", "nodes", "is_tls", "is_cluster"),
    [
        ("valkey://one", (("one", 6379),), False, False),
        ("redis://one:7000", (("one", 7000),), False, False),
        ("rediss://one:7000", (("one", 7000),), True, False),
        ("valkeys://[::1]:7000", (("::1", 7000),), True, False),
        ("valkey+cluster://one:1,two:2,[::1]", (("one", 1), ("two", 2), ("::1", 6379)), False, True),
        ("rediss+cluster://one", (("one", 6379),), True, True),
    ],
)
def test_an_address_says_where_and_how(url, nodes, is_tls, is_cluster):
    address = parse_address(url)
    assert (address.nodes, address.is_tls, address.is_cluster) == (nodes, is_tls, is_cluster)
    assert (address.connections, address.timeout_s, address.lookup_timeout_s, address.ttl_s) == (2, 0.5, 0.1, None)


def test_an_address_has_options_and_a_password_that_it_does_not_show(tmp_path):
    url = "redis://ann:p%40ss%3A%23@host:1/3?connections=8&timeout_ms=250&lookup_ms=20&ttl_s=60"
    address = parse_address(url)
    assert (address.username, address.password, address.db) == ("ann", "p@ss:#", 3)
    assert (address.connections, address.timeout_s, address.lookup_timeout_s, address.ttl_s) == (8, 0.25, 0.02, 60)
    assert "p@ss" not in repr(address) + str(address) and str(address) == "valkey://host:1"
    (tmp_path / "password").write_text("in a file\n")
    from_file = parse_address(f"valkey://host?password_file={tmp_path / 'password'}")
    assert (from_file.username, from_file.password) == (None, "in a file")


@pytest.mark.parametrize(
    "url",
    [
        *("", "host:6379", "http://host", "valkey://", "valkey://host:0", "valkey://host:99999", "valkey://host:x"),
        *(
            "valkey://one,two",
            "valkey+cluster://one,,two",
            "valkey+cluster://one/1",
            "valkey://host/x",
            "valkey://host#x",
        ),
        *("valkey://host?connections=0", "valkey://host?lookup_ms=1.5", "valkey://host?unknown=1", "valkey://host?db"),
        *("valkey://host?ttl_s=1&ttl_s=2", "valkey://host?ca_file=/x", "valkey://host?password_file=/not/there"),
        *("valkey://a:hidden@host?password_file=/dev/null", "valkey://a:hidden@host:port", "valkey://a:hidden@b?x=1"),
        *("valkey://a:b/hidden@host", "valkey://a:b?hidden=3@host", "valkey://a:hidden@b@c/hidden@host"),
        *(
            "valkey://a:hidden%ff@host",
            "valkey://a:b#hidden@host",
            "valkey://ho st",
            "valkey://host\n",
            "valkey://[::1",
        ),
    ],
)
def test_an_address_that_cannot_be_read_is_refused_without_its_password(url):
    with pytest.raises(InvalidArgumentError) as error:
        parse_address(url)
    assert str(error.value).startswith("store: ") and "hidden" not in str(error.value)


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_certificates_that_cannot_be_read_are_an_error_at_the_start(tmp_path, content):
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidArgumentError, match="ca_file: expected a file of certificates, got"):
        parse_address(f"valkeys://host?ca_file={file}")


@pytest.mark.parametrize("password", ["p[ss", "p]ss", "p\u2100ss", "p@ss", "p\tss", "p:ss", "\u00fc", "100%"])
def test_a_password_may_have_any_characters_but_three(password):
    address = parse_address(f"valkey+cluster://ann:{password}@one:1,[::1]:2?lookup_ms=5")
    assert (address.username, address.password) == ("ann", password)
    assert address.nodes == (("one", 1), ("::1", 2)) and address.lookup_timeout_s == 0.005


def test_names_differ_where_blocks_may_not_be_shared():
    digest = BlockIdentity(b"", b"", bytes(16)).digest()
    sealers = [Sealer(bytes(32)), Sealer(b"\1" * 32), Sealer(bytes(32), SECRET), Sealer(bytes(32), SECRET + b"!")]
    names = [StoreNames(sealer) for sealer in sealers]
    salts = (None, "", "none", "ann", "\udcff")
    blocks = {one.block(one.tenant(salt), digest) for one in names for salt in salts}
    assert len(blocks) == len(sealers) * len(salts)
    again = StoreNames(Sealer(bytes(32), SECRET))
    assert again.block(again.tenant("ann"), digest) == names[2].block(names[2].tenant("ann"), digest)
    assert all(name.isascii() and not set(name) & set("*?[]\\ ") and "ann" not in name for name in blocks)
    block = names[0].block(names[0].tenant("ann"), digest)
    assert block.startswith(names[0].tenant("ann") + ":")
    of_ann = [block, names[0].claim(block), names[0].index(names[0].tenant("ann"))]
    assert len(set(of_ann)) == 3
    for tenant in (names[0].tenant("ann"), None):
        claims, others = ([key for key in of_ann if fnmatchcase(key, one)] for one in names[0].patterns(tenant))
        assert (claims, others) == ([of_ann[1]], [of_ann[0], of_ann[2]]), "a deletion finds all of them"
        stones = [names[0].tombstone(one) for one in (None, names[0].tenant("ann"))]
        assert len(set(stones)) == 2 and not matches(stones, names[0].patterns(tenant))
    assert not matches(of_ann, names[0].patterns(names[0].tenant("bob")))
    assert not matches(of_ann, names[1].patterns(None))


def matches(keys, patterns):
    return any(fnmatchcase(key, pattern) for key in keys for pattern in patterns)


def test_a_digest_is_read_back_from_its_block_s_key_alone():
    names = StoreNames(Sealer(bytes(32)))
    tenant, digest = names.tenant("ann"), bytes(range(32))
    block = names.block(tenant, digest)
    assert names.digest(tenant, block.encode()) == digest
    others = [names.claim(block), names.index(tenant), f"{block}:w", f"{tenant}:no digest", names.block("x", digest)]
    assert [names.digest(tenant, key.encode()) for key in others] == [None] * len(others)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_store_that_fails_is_left_alone_longer_each_time_and_tried_before_it_is_used():
    clock = Clock()
    breaker = Breaker(clock, lambda: 1.0)
    assert not breaker.is_open and breaker.seconds_to_probe() is None
    pauses = []
    for _ in range(10):
        breaker.note_failure()
        breaker.note_failure()  # at the same moment: the same failure
        pauses.append(breaker.seconds_to_probe())
        assert breaker.is_open
        clock.now += pauses[-1]
        assert breaker.is_open and breaker.seconds_to_probe() == 0.0, "open until a probe has succeeded"
    expected = [min(MOST_PAUSE_S, FIRST_PAUSE_S * 2**number) for number in range(10)]
    assert pauses == pytest.approx(expected)
    breaker.note_answer()
    assert not breaker.is_open
    breaker.note_failure()
    assert breaker.seconds_to_probe() == MOST_PAUSE_S, "to answer isn't to bring bytes"
    breaker.note_success()
    breaker.note_failure()
    assert breaker.seconds_to_probe() == pytest.approx(FIRST_PAUSE_S)


def test_pauses_are_spread_so_that_servers_do_not_come_back_together():
    for draw, share in ((0.0, 0.5), (0.5, 0.75)):
        breaker = Breaker(Clock(), lambda draw=draw: draw)
        breaker.note_failure()
        assert breaker.seconds_to_probe() == pytest.approx(FIRST_PAUSE_S * share)
