"""`SharedStore` on a real server: what it gives back, what it refuses, and what it does when the server fails."""

import logging
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from tiers.store.servers import behind_tls, cluster, cluster_url, proxied, running, wait_for

from kvblocks.errors import InvalidArgumentError
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.sealing import Sealer
from kvblocks.tiers.store import SharedStore, StoreError, parse_address
from kvblocks.tiers.store import store as store_module
from kvblocks.tiers.store.client import ValkeyClient, open_clients
from kvblocks.tiers.store.names import StoreNames
from kvblocks.tiers.store.store import MOST_LOOKUPS, Owner

SIZE = 20_000  # bytes of a block
SECRET = b"sixteen bytes or more"
NOBODY = Owner(None)
PATIENT = "?timeout_ms=20000&lookup_ms=20000"  # for a machine that is busy with something else


@pytest.fixture(scope="module")
def module_server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def server(module_server):
    with module_server.client() as client:
        client.flushall()
        client.config_set("maxmemory", 0)
    return module_server


@pytest.fixture
def connect():
    """Clients of a store, as many as servers would be; closed in the end."""
    made = []

    def open_store(url, *, fingerprint=bytes(32), secret=None, options=PATIENT):
        address = parse_address(url + options)
        made.append(SharedStore(address, Sealer(fingerprint, secret), open_clients(address)))
        return made[-1]

    yield open_store
    for store in made:
        store.close()


def chain(number, first=0):
    """Blocks of one prefix, and bytes for each."""
    identities, parent = [], b""
    for index in range(number):
        identities.append(BlockIdentity(parent, b"", (first + index).to_bytes(4, "little") * 4))
        parent = identities[-1].digest()
    return identities, [bytes([index % 251]) * SIZE for index in range(number)]


def read(store, identities, salt=None):
    return [None if one is None else bytes(one) for one in store.read(salt, identities, SIZE * len(identities))]


def finds(store, identities, salt=None):
    return store.find([(salt, [identity.digest() for identity in identities])])[0]


def come_back(store):
    wait_for(lambda: store.probe() or None)


# --- what is there ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, SECRET])
def test_what_one_stores_another_finds_and_reads(server, connect, secret):
    one, other = connect(server.url, secret=secret), connect(server.url, secret=secret)
    identities, payloads = chain(40)
    assert finds(one, identities) == [False] * 40
    assert one.write(NOBODY, identities[:30], payloads[:30])
    assert finds(other, identities) == [True] * 30 + [False] * 10
    assert read(other, identities) == payloads[:30] + [None] * 10
    assert (other.stats.num_read_blocks, other.stats.num_missing_blocks) == (30, 10)
    assert other.write(NOBODY, identities, payloads)
    assert (other.stats.num_written_blocks, other.stats.num_present_blocks) == (10, 30)
    assert server.client().dbsize() == 40, "no claim stays"


def test_several_prompts_are_asked_for_at_once(server, connect):
    store = connect(server.url)
    (first, payloads), (second, _) = chain(5), chain(5, first=50)
    store.write(NOBODY, first[:2], payloads[:2])
    store.write(Owner("ann"), second[:3], payloads[:3])
    asked = [
        (salt, [one.digest() for one in blocks]) for salt, blocks in ((None, first), ("ann", second), (None, second))
    ]
    assert store.find(asked) == [[True] * 2 + [False] * 3, [True] * 3 + [False] * 2, [False] * 5]
    assert store.stats.num_lookups == 1
    assert store.find([]) == []


class Slow:
    """Replaces a client and the clock: all blocks are there, and each batch takes so many seconds."""

    def __init__(self, seconds=0.0):
        self.seconds, self.sizes, self.now_s = seconds, [], 0.0

    def monotonic(self):
        return self.now_s

    def run(self, commands, timeout_s):
        assert self.seconds <= timeout_s, "it would have failed"
        self.sizes.append(len(commands))
        self.now_s += self.seconds
        return [1] * len(commands)

    def close(self):
        pass


def test_long_prompts_are_asked_for_in_batches_and_a_slow_store_has_not_failed(monkeypatch):
    def ask(client, *numbers):
        monkeypatch.setattr(store_module, "time", client)
        store = SharedStore(parse_address("valkey://host?lookup_ms=100"), Sealer(bytes(32)), (client,) * 3)
        found = store.find(
            [
                (None, [bytes([prompt]) + place.to_bytes(31, "big") for place in range(number)])
                for prompt, number in enumerate(numbers)
            ]
        )
        assert [len(one) for one in found] == list(numbers) and not store.is_away
        return [one.count(True) for one in found]

    quick, slow = Slow(), Slow(0.06)
    assert ask(quick, 3000, 10, 500) == [3000, 10, 500]
    assert max(quick.sizes) == MOST_LOOKUPS and sum(quick.sizes) == 3510
    first, second = ask(slow, 3 * MOST_LOOKUPS, 4 * MOST_LOOKUPS)
    assert first + second == sum(slow.sizes) == 2 * MOST_LOOKUPS


def test_warnings_are_written_while_nothing_is_locked(server, connect, caplog):
    store = connect(server.url)
    identities, payloads = chain(1)
    store.write(NOBODY, identities, payloads)
    server.client().set(
        StoreNames(Sealer(bytes(32))).block(StoreNames(Sealer(bytes(32))).tenant(None), identities[0].digest()), b"x"
    )
    asked = []

    class Asking(logging.Handler):
        """Asks the store for its counters, as a handler may that sends metrics along."""

        def emit(self, record):
            asked.append(store.stats.num_damaged_blocks)

    handler = Asking()
    logging.getLogger("kvblocks.tiers.store").addHandler(handler)
    try:
        assert read(store, identities) == [None]
    finally:
        logging.getLogger("kvblocks.tiers.store").removeHandler(handler)
    assert asked == [1]


def test_who_differs_in_fingerprint_or_secret_shares_nothing(server, connect):
    identities, payloads = chain(3)
    connect(server.url).write(NOBODY, identities, payloads)
    for options in ({"fingerprint": b"\1" * 32}, {"secret": SECRET}):
        other = connect(server.url, **options)
        assert finds(other, identities) == [False] * 3
        assert other.write(NOBODY, identities, payloads) and other.stats.num_written_blocks == 3
    assert read(connect(server.url), identities) == payloads


def test_blocks_stay_as_long_as_the_address_says(server, connect):
    identities, payloads = chain(2)
    connect(server.url, options=f"{PATIENT}&ttl_s=100").write(NOBODY, identities, payloads)
    client = server.client()
    assert all(0 < client.ttl(key) <= 100 for key in client.scan_iter())


# --- what is refused -------------------------------------------------------------------------------------------------


def keys_of(server):
    """All keys but tombstones."""
    return sorted(key for key in server.client().keys("*") if not key.startswith(b"kvblocks:1:f:"))


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("damage", ["a bit", "shorter", "longer", "empty", "another block's", "another type"])
def test_a_value_that_is_not_the_block_is_not_used(server, connect, secret, damage, caplog):
    store = connect(server.url, secret=secret)
    identities, payloads = chain(2)
    store.write(NOBODY, identities, payloads)
    client = server.client()
    names = {one.digest().hex(): one for one in identities}
    keys = {names[key.decode().rsplit(":", 1)[1]]: key for key in client.scan_iter()}
    first, second = (keys[one] for one in identities)
    value = client.get(second)
    for place in (0, 60, 100, len(value) - 1) if damage == "a bit" else (0,):
        if damage == "another type":
            client.delete(second)
            client.lpush(second, b"x")
        else:
            client.set(
                second,
                {
                    "a bit": value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :],
                    "shorter": value[:-1],
                    "longer": value + b"x",
                    "empty": b"",
                    "another block's": client.get(first),
                }[damage],
            )
        with caplog.at_level(logging.WARNING, "kvblocks.tiers.store"):
            assert read(store, identities) == [payloads[0], None]
        assert client.exists(second) == 0, "it is deleted"
        assert client.exists(first), "and nothing else"
    assert store.stats.num_damaged_blocks and "not what they should be" in caplog.text
    other = connect(server.url, secret=secret)
    assert finds(other, identities) == [True, False]
    assert other.write(NOBODY, identities, payloads) and other.stats.num_written_blocks == 1, "it is written again"
    assert read(store, identities) == payloads


def key_of(server, identity):
    (key,) = server.client().keys(f"*:{identity.digest().hex()}")
    return key


def test_what_somebody_wrote_again_meanwhile_is_not_deleted(server, connect, monkeypatch):
    """Two servers read one damaged value. The first deletes it and writes the block before the other deletes."""
    one, other = connect(server.url), connect(server.url)
    identities, payloads = chain(1)
    one.write(NOBODY, identities, payloads)
    key = key_of(server, identities[0])
    server.client().set(key, b"damage")
    deletes = SharedStore._delete_bad  # noqa: SLF001

    def late(store, *given):
        if store is other:
            assert read(one, identities) == [None] and one.write(NOBODY, identities, payloads)
        deletes(store, *given)

    monkeypatch.setattr(SharedStore, "_delete_bad", late)
    assert read(other, identities) == [None]
    assert read(other, identities) == payloads and server.client().exists(key)


def test_damage_on_the_way_deletes_nothing(server, connect):
    identities, payloads = chain(8)
    connect(server.url).write(NOBODY, identities, payloads)
    with proxied(server) as proxy:
        store = connect(proxy.url, options=QUICK)
        for _ in range(20):
            come_back(store)
            proxy.corrupts, proxy.piece = 0.3, 16384
            took(read, store, identities)
            proxy.corrupts = 0.0
        assert store.stats.num_damaged_blocks
    assert read(connect(server.url), identities) == payloads


def test_a_bad_value_that_cannot_be_deleted_is_not_touched_for_a_while(tmp_path, connect, monkeypatch, caplog):
    """A user that may only read: its lookups must not keep the value alive."""
    with running(tmp_path) as server:
        identities, payloads = chain(3)
        connect(server.url).write(NOBODY, identities, payloads)
        key = key_of(server, identities[1])
        admin = server.client()
        admin.set(key, b"damage")
        admin.execute_command("ACL", "SETUSER", "reader", "on", ">pass", "~*", "-@all", "+get", "+touch", "+client")
        store = connect(f"valkey://reader:pass@127.0.0.1:{server.port}")
        with caplog.at_level(logging.WARNING, "kvblocks.tiers.store"):
            assert read(store, identities) == [payloads[0], None, payloads[2]]
        assert "no permissions" in caplog.text and not store.is_away
        wait_for(lambda: admin.object("idletime", key) >= 2)
        assert finds(store, identities) == [True, False, True]
        touched_s = admin.object("idletime", key_of(server, identities[0]))
        assert admin.object("idletime", key) >= touched_s + 2
        monkeypatch.setattr(store_module, "SHUN_S", 0.0)
        read(store, identities)
        assert finds(store, identities) == [True] * 3, "it is tried again some day"


def test_without_the_secret_nobody_can_plant_a_block(server, connect):
    """An attacker who can write to the store knows all keys, and can read and move all values."""
    honest, thief = connect(server.url, secret=SECRET), Sealer(bytes(32))
    identities, payloads = chain(2)
    honest.write(NOBODY, identities, payloads)
    client = server.client()
    for identity in identities:
        (key,) = client.keys(f"*{identity.digest().hex()}")
        forged = bytes(SIZE)
        client.set(key, thief.seal(identity, forged) + forged)
    assert read(honest, identities) == [None, None]
    assert honest.stats.num_damaged_blocks == 2


def test_a_full_store_refuses_and_goes_on_serving(server, connect, caplog):
    store = connect(server.url)
    identities, payloads = chain(6)
    store.write(NOBODY, identities[:3], payloads[:3])
    server.client().config_set("maxmemory-policy", "noeviction")
    server.client().config_set("maxmemory", 1)
    with caplog.at_level(logging.WARNING, "kvblocks.tiers.store"):
        assert not store.write(NOBODY, identities[3:], payloads[3:])
    assert store.stats.num_refused_blocks == 3 and not store.is_away and "maxmemory" in caplog.text
    assert (store.stats.num_written_blocks, store.stats.num_present_blocks) == (3, 0)
    assert read(store, identities) == payloads[:3] + [None] * 3


def test_what_is_evicted_is_missing(server, connect):
    store = connect(server.url)
    identities, payloads = chain(200)
    server.client().config_set("maxmemory-policy", "allkeys-lru")
    server.client().config_set("maxmemory", server.client().info("memory")["used_memory"] + 100 * SIZE)
    for start in range(0, 200, 20):
        assert store.write(NOBODY, identities[start : start + 20], payloads[start : start + 20])
    found = finds(store, identities)
    assert 0 < sum(found) < 200
    values = read(store, identities)
    assert all(value is None or value == payload for value, payload in zip(values, payloads, strict=True))


# --- many servers ----------------------------------------------------------------------------------------------------


def test_ten_servers_that_computed_one_prefix_store_it_once(server, connect):
    stores = [connect(server.url) for _ in range(10)]
    identities, payloads = chain(40)
    gate = threading.Barrier(10)

    def store_it(store):
        gate.wait()
        for start in range(0, 40, 10):
            assert store.write(NOBODY, identities[start : start + 10], payloads[start : start + 10])

    threads = [threading.Thread(target=store_it, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(store.stats.num_written_blocks for store in stores) == 40
    assert read(stores[0], identities) == payloads


def test_what_another_server_writes_during_a_claim_is_not_written_again(server, connect, monkeypatch):
    """Several connections carry out the commands of a call in any order, here in the opposite one."""
    one, other = connect(server.url), connect(server.url)
    identities, payloads = chain(1)
    run, others = ValkeyClient.run, [lambda: other.write(NOBODY, identities, payloads)]

    def in_any_order(client, commands, timeout_s):
        if not others or all(command[0] != "SET" for command in commands):
            return run(client, commands, timeout_s)
        answers = []
        for command in reversed(commands):
            if command[0] == "SET":
                others.pop()()
            answers += run(client, [command], timeout_s)
        return answers[::-1]

    monkeypatch.setattr(ValkeyClient, "run", in_any_order)
    assert one.write(NOBODY, identities, payloads)
    assert (one.stats.num_written_blocks, other.stats.num_written_blocks) == (0, 1)


def test_a_claim_of_a_server_that_died_ends_by_itself(server, connect):
    one, other = connect(server.url), connect(server.url)
    identities, payloads = chain(1)
    names = StoreNames(Sealer(bytes(32)))
    claim = names.claim(names.block(names.tenant(None), identities[0].digest()))
    server.client().set(claim, b"1", px=60_000)  # whose server dies
    assert one.write(NOBODY, identities, payloads) and one.stats.num_present_blocks == 1, "somebody is writing it"
    server.client().pexpire(claim, 100)
    wait_for(lambda: other.write(NOBODY, identities, payloads) and other.stats.num_written_blocks)
    assert read(other, identities) == payloads


# --- tenants ---------------------------------------------------------------------------------------------------------


def test_a_tenant_is_deleted_whoever_stored_it_and_nobody_else(server, connect):
    one, other = connect(server.url), connect(server.url)
    identities, payloads = chain(30)
    for salt in ("ann", "bob", None):
        one.write(Owner(salt), identities[:20], payloads[:20])
        other.write(Owner(salt, 100), identities[20:], payloads[20:])
    assert other.forget("ann", 20.0) == 31  # with the list for the quota
    assert [sum(finds(one, identities, salt)) for salt in ("ann", "bob", None)] == [0, 30, 30]
    assert one.forget(None, 20.0) == 31
    assert [sum(finds(one, identities, salt)) for salt in ("ann", "bob", None)] == [0, 30, 0]
    assert one.forget_all(20.0) == 31 and keys_of(server) == []


# --- failures --------------------------------------------------------------------------------------------------------

QUICK = "?timeout_ms=500&lookup_ms=500"


def took(function, *given):
    """Return a call's result, or its StoreError."""
    try:
        return function(*given)
    except StoreError as error:
        return error


def put(store, owner, identities, payloads):
    """Store blocks however often a machine that is busy is late. What was claimed in vain is free after a while."""
    wait_for(
        lambda: (
            (took(store.write, owner, identities, payloads) is True and all(finds(store, identities, owner.salt)))
            or (store.probe() and None)
        )
    )


def answer_of(store, function, *given):
    """The first answer that comes in time, which on a busy machine isn't always that of the first call."""
    answers = []

    def call():
        answers.append(took(function, *given))
        return not isinstance(answers[-1], StoreError) or (store.probe() and None)

    wait_for(call)
    return answers[-1]


@pytest.mark.parametrize("fault", ["hangs", "trickles", "refuses", "cuts", "is gone"])
def test_a_store_that_fails_is_left_alone_and_comes_back(tmp_path, connect, fault):
    """Each call ends in time. Then no call is made until the store is back; then all is as before."""
    identities, payloads = chain(30)
    with running(tmp_path) as server, proxied(server) as proxy:
        store = connect(proxy.url, options=QUICK)
        put(store, NOBODY, identities, payloads)
        port, num_failures = server.port, store.stats.num_failures
        if fault == "hangs":
            proxy.hangs = True
        elif fault == "trickles":
            proxy.piece, proxy.delay_s = 100, 0.05
        elif fault == "is gone":
            server.kill()
            proxy.cut_all()
        else:
            proxy.cuts, proxy.refuses = (1.0, False) if fault == "cuts" else (0.0, True)
            proxy.cut_all()
        result = took(store.read, None, identities, SIZE * 30)
        assert isinstance(result, StoreError) and store.is_away and store.stats.num_failures == num_failures + 1
        num_before = store.stats.num_skipped
        assert finds(store, identities) == [False] * 30
        assert isinstance(took(store.write, NOBODY, identities, payloads), StoreError)
        assert store.stats.num_skipped == num_before + 2, "nothing is asked meanwhile"
        for _ in range(4 if fault == "trickles" else 0):  # it answers, but brings nothing: no thread stays with it
            come_back(store)
            assert isinstance(took(store.read, None, identities, SIZE * 30), StoreError)
        if fault == "trickles":
            absent, _ = chain(1, first=999)
            assert answer_of(store, read, store, absent) == [None]
        proxy.hangs = proxy.refuses = False
        proxy.piece, proxy.delay_s, proxy.cuts = 65536, 0.0, 0.0
        if fault == "is gone":
            server.port = port
            server.start()
        come_back(store)
        expected = [None] * 30 if fault == "is gone" else payloads  # it came back empty
        assert answer_of(store, read, store, identities) == expected


def test_a_flushed_store_is_an_empty_one(server, connect):
    store = connect(server.url)
    identities, payloads = chain(3)
    store.write(NOBODY, identities, payloads)
    server.client().flushall()
    assert finds(store, identities) == [False] * 3 and read(store, identities) == [None] * 3
    assert store.write(NOBODY, identities, payloads) and read(store, identities) == payloads
    assert store.stats.num_failures == 0


def test_a_connection_that_was_closed_while_nobody_used_it_is_no_failure(server, connect):
    with proxied(server) as proxy:
        store = connect(proxy.url)
        identities, payloads = chain(3)
        store.write(NOBODY, identities, payloads)
        proxy.cut_all()
        assert read(store, identities) == payloads and finds(store, identities) == [True] * 3
        assert store.stats.num_failures == 0


def test_a_command_is_repeated_once_over_a_cut_connection_if_there_is_time(server, connect, monkeypatch):
    """By us: valkey's own retry would repeat it without regard to our deadline."""
    import valkey

    with proxied(server) as proxy:
        client = connect(proxy.url)._stores  # noqa: SLF001
        client.run([("SET", "kvblocks:x", b"1")], 20.0)
        plain, begun = type(client)._run_once, []  # noqa: SLF001

        def cut_behind(self, node, commands):
            answers = plain(self, node, commands)  # the server did it, and the answer is lost
            begun.append(commands[0][0])
            if len(begun) == 1:
                raise valkey.ConnectionError("cut")
            return answers

        monkeypatch.setattr(type(client), "_run_once", cut_behind)
        assert client.run([("TOUCH", "kvblocks:x")], 20.0) == [1] and begun == ["TOUCH", "TOUCH"]
        begun.clear()
        with pytest.raises(StoreError):  # there is no time left
            client._run_part(None, [("TOUCH", "kvblocks:x")], 0.0)  # noqa: SLF001
        assert begun == ["TOUCH"]
        assert client._single.get_retry()._retries == 0  # noqa: SLF001


@pytest.mark.parametrize("seed", range(3))
def test_damaged_answers_never_give_wrong_bytes(server, connect, seed):
    """Whatever bits change on the way: a block that is returned is right."""
    identities, payloads = chain(30)
    connect(server.url).write(NOBODY, identities, payloads)
    with proxied(server, seed) as proxy:
        store = connect(proxy.url, options="?timeout_ms=100&lookup_ms=100")
        proxy.corrupts, proxy.cuts, proxy.piece = 0.1, 0.02, 4096
        num_right = 0
        for _ in range(20):
            found = took(read, store, identities)
            if isinstance(found, StoreError):
                store.probe()
                continue
            assert len(found) == 30
            assert all(value is None or value == payload for value, payload in zip(found, payloads, strict=True))
            num_right += sum(value is not None for value in found)
            finds(store, identities)
        assert proxy.num_faults and (num_right or store.stats.num_failures)
        proxy.corrupts, proxy.cuts, proxy.piece = 0.0, 0.0, 65536  # small ones would take a busy machine too long
        wait_for(lambda: store.probe() and took(read, store, identities) == payloads)


def test_a_wrong_password_is_a_store_that_is_away(tmp_path, connect, caplog):
    with running(tmp_path, "--requirepass", "right") as server:
        identities, payloads = chain(2)
        place = f"127.0.0.1:{server.port}"
        good, bad = connect(f"valkey://:right@{place}"), connect(f"valkey://:mistaken@{place}")
        assert good.write(NOBODY, identities, payloads) and read(good, identities) == payloads
        with caplog.at_level(logging.WARNING, "kvblocks.tiers.store"):
            assert finds(bad, identities) == [False] * 2
        assert bad.is_away and "mistaken" not in caplog.text and "password" in caplog.text


def test_a_user_with_the_rights_that_the_page_names_does_all_that_is_needed(tmp_path, connect):
    page = (Path(__file__).resolve().parents[3] / "docs" / "store.md").read_text(encoding="utf-8")
    rights = re.search(r"^ACL SETUSER (.*)$", page, re.MULTILINE)[1]
    with running(tmp_path) as server:
        server.client().execute_command("ACL", "SETUSER", *rights.replace("PASSWORD", "pass").split())
        store = connect(f"valkey://kvblocks:pass@127.0.0.1:{server.port}")
        identities, payloads = chain(4)
        assert store.probe() and store.write(Owner("ann", 3), identities, payloads)
        assert read(store, identities, "ann") == [*payloads[:3], None]
        assert finds(store, identities, "ann") == [True] * 3 + [False]
        assert store.forget("ann", 20.0) == 4
        assert (store.stats.num_refused_blocks, store.stats.num_failures) == (0, 0)


def test_tls_checks_the_certificate(server, tmp_path, connect):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=elsewhere", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*make, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    identities, payloads = chain(2)
    with behind_tls(server, certificate, key) as port:
        url = f"valkeys://127.0.0.1:{port}"
        good = connect(url, options=f"{PATIENT}&ca_file={certificate}")
        assert good.address.ca_file == str(certificate)
        assert good.write(NOBODY, identities, payloads) and read(good, identities) == payloads
        assert not connect(url).probe(), "whom the system trusts didn't sign it"
        assert not connect(f"valkeys://localhost:{port}", options=f"{PATIENT}&ca_file={certificate}").probe()


def test_without_the_package_an_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "valkey", None)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'kvblocks\[valkey\]'"):
        open_clients(parse_address("valkey://host"))


# --- a cluster -------------------------------------------------------------------------------------------------------


def test_a_cluster_loses_what_a_killed_node_had_and_nothing_else(tmp_path, connect):
    identities, payloads = chain(60)
    with cluster(tmp_path) as servers:
        store = connect(cluster_url(servers))
        assert store.write(NOBODY, identities, payloads) and finds(store, identities) == [True] * 60
        assert all(server.client().dbsize() for server in servers), "each node has some"
        assert read(store, identities) == payloads
        servers[1].kill()
        wait_for(lambda: some(took(read, store, identities)) or (store.probe() and None))
        found = took(read, store, identities)
        assert 0 < len(some(found)) < 60
        assert all(value is None or value == payload for value, payload in zip(found, payloads, strict=True))
        more, _ = chain(20, first=1000)
        wait_for(lambda: not isinstance(took(store.write, NOBODY, more, payloads[:20]), StoreError) or store.probe())
        assert 0 < sum(finds(store, more)) < 20
        number = len(some(found)) + sum(finds(store, more))
        with pytest.raises(StoreError):
            store.forget(None, 5.0)  # the node that is gone may come back with its part
        assert number


@pytest.mark.exhaustive
def test_a_replica_that_takes_over_serves_what_its_primary_had(tmp_path, connect):
    """A primary is killed. Its replica is elected, and clients learn of it."""
    identities, payloads = chain(60)
    with cluster(tmp_path, num_replicas=3) as servers:
        primaries, replicas = servers[:3], servers[3:]
        store = connect(cluster_url(servers))
        assert store.write(NOBODY, identities, payloads) and read(store, identities) == payloads
        wait_for(
            lambda: all(a.client().dbsize() == b.client().dbsize() for a, b in zip(primaries, replicas, strict=True))
        )
        primaries[1].kill()
        assert not all(finds(store, identities)), "its part is gone at first"
        wait_for(lambda: took(read, store, identities) == payloads or (store.probe() and None))
        more, payloads = chain(20, first=1000)
        wait_for(lambda: took(store.write, NOBODY, more, payloads) is True or (store.probe() and None))
        assert read(store, more) == payloads, "stores have connections of their own, which learn of it by themselves"


def some(values):
    return [] if isinstance(values, StoreError) else [value for value in values if value is not None]
