"""Host headers: which names a server on the loopback answers to."""

import pytest

from kvblocks.server.access.hosts import HostCheck, is_host
from kvblocks.server.errors import ApiError

CHECK = HostCheck(["kv.example", "FD00:0::1", "10.0.0.7"])


def headers(*hosts):
    return [(b"accept", b"*/*"), *((b"host", host.encode("latin-1")) for host in hosts)]


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LocalHost:1", "localhost.", "localhost.:80", " localhost "),
        *("127.0.0.1", "127.0.0.1:8000", "127.8.8.8", "[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]:8000"),
        *("kv.example", "KV.Example:443", "kv.example.", "[fd00::1]", "[FD00:0:0::1]:8", "10.0.0.7:8000"),
    ],
)
def test_names_that_are_served(host):
    CHECK.check(headers(host))


@pytest.mark.parametrize(
    "hosts",
    [
        *(["evil.example"], ["evil.example:8000"], ["kv.example.evil.example"], ["xkv.example"], ["sub.kv.example"]),
        *(["localhost.evil.example"], ["127.0.0.1.evil.example"], ["evil.localhost"], ["localhost:80:90"]),
        *(["0.0.0.0"], ["[::]"], ["10.0.0.8"], ["[fd00::2]"], ["::1"], ["[localhost]"], ["127.1"], ["2130706433"]),
        *(["localhost@evil.example"], ["evil.example@localhost"], ["localhost, evil.example"], ["localhost/x"]),
        *([""], [" "], [":8000"], ["[]"], ["."], ["\xe9.example"], []),
        *(["localhost", "evil.example"], ["localhost", "localhost"]),
    ],
)
def test_other_names_are_refused(hosts):
    with pytest.raises(ApiError, match=r"expected a Host header with localhost.*, got ") as raised:
        CHECK.check(headers(*hosts))
    assert raised.value.status == 403
    assert raised.value.code == "host_not_allowed"
    assert len(raised.value.message) < 300
    raised.value.message.encode("ascii")


def test_a_long_name_is_not_repeated():
    with pytest.raises(ApiError) as raised:
        CHECK.check(headers("a" * 10_000))
    assert len(raised.value.message) < 300


@pytest.mark.parametrize("name", ["a", "a.b", "kv-1.example", "EXAMPLE.org", "127.0.0.1", "::1", "fd00::1"])
def test_what_may_be_allowed(name):
    assert is_host(name)


@pytest.mark.parametrize("name", ["", "*", "a:80", "[::1]", "http://a", "a/b", ".a", "a b", "é"])
def test_what_is_no_name(name):
    assert not is_host(name)
