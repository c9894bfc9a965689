"""The file of keys: what it may say, and errors that name the place and never a key."""

import logging
import os
import re
from pathlib import Path

import pytest

from kvblocks.errors import InvalidArgumentError
from kvblocks.server.access.callers import Caller, digest_of
from kvblocks.server.access.keys_file import parse_keys, read_keys

KEY, OTHER = "sk-0123456789abcdef", "sk-fedcba9876543210"


def entry(**fields):
    values = {"tenant": '"a"', "key": f'"{KEY}"', **fields}
    return "[[key]]\n" + "".join(f"{name} = {value}\n" for name, value in values.items() if value is not None)


def test_entries():
    text = entry(max_requests=3, quota=0, tier_quotas="{ disk = 9, host = 8 }")
    text += entry(tenant='"B-2._"', key=f'"{OTHER}"', chooses_salt="true")
    first, second = parse_keys(text.encode(), "keys")
    assert first.caller == Caller("a", may_choose_salt=False, max_requests=3)
    assert (first.max_cached_blocks, first.tier_blocks) == (0, {"disk": 9, "host": 8})
    assert first.digest == digest_of(KEY)
    assert second.caller == Caller("B-2._")
    assert (second.max_cached_blocks, second.tier_blocks) == (None, {})
    assert not (first.caller.is_operator or first.caller.sees_others)
    assert KEY not in repr(first)
    assert first.digest.hex() not in repr(first)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["one or more tables [[key]]"]),
        ("key = []", ["one or more tables"]),
        ("key = [1]", ["one or more tables"]),
        (f'key = "{KEY}"', ["one or more tables"]),
        (entry() + f'[{KEY}]\n"x" = 1\n', ["one or more tables"]),
        (f"[[key]]\nkey = {KEY}\n", ["TOML", "at line 2"]),
        (f'[[key]]\nkey = "{KEY}\n', ["TOML", "at line 2"]),
        (f'[[key]]\nkey = "{KEY}"\nkey = "{KEY}"\n', ["TOML", "at line 3"]),
        (entry(tenant=None), ["key 1", "tenant"]),
        (entry(tenant='"a/b"'), ["key 1", "tenant", "letters"]),
        (entry(tenant=f'"{KEY}/"'), ["key 1", "tenant"]),
        (entry(tenant='""'), ["key 1", "tenant"]),
        (entry(tenant=f'"{"a" * 65}"'), ["key 1", "tenant", "64"]),
        (entry(key=None), ["key 1 (a)", "at least 16 characters", "got none"]),
        (entry(key='"sk-short"'), ["key 1 (a)", "got 8 characters"]),
        (entry(key=f'"{KEY} {KEY}"'), ["key 1 (a)", "without spaces"]),
        (entry(key=f'"{KEY}é"'), ["key 1 (a)", "ASCII"]),
        (entry(**{KEY: 1}), ["key 1", "no fields but tenant, key", "got another one"]),
        (entry(max_requests=0), ["key 1 (a): max_requests: expected an integer of at least 1"]),
        (entry(max_requests="true"), ["max_requests"]),
        (entry(quota=-1), ["key 1 (a): quota: expected an integer of at least 0"]),
        (entry(quota="1.5"), ["quota"]),
        (entry(quota=2**63), ["quota"]),
        (entry(tier_quotas="3"), ["tier_quotas", "host, disk, store"]),
        (entry(tier_quotas=f'{{ "{KEY}" = 3 }}'), ["tier_quotas", "host, disk, store"]),
        (entry(tier_quotas="{ disk = -1 }"), ["key 1 (a): disk: expected an integer"]),
        (entry(chooses_salt="1"), ["chooses_salt: expected true or false"]),
        (entry(chooses_salt="true", quota=4), ["no quota with chooses_salt"]),
        (entry(chooses_salt="true", tier_quotas="{ disk = 4 }"), ["no quota with chooses_salt"]),
        (entry() + entry(tenant='"b"'), ["key 2: expected another key than key 1's"]),
        (entry() + entry(key=f'"{OTHER}"'), ["key 2: expected another tenant than key 1's, got 'a'"]),
    ],
)
def test_what_is_wrong_is_said_without_the_key(text, words):
    with pytest.raises(InvalidArgumentError) as raised:
        parse_keys(text.encode(), "keys.toml")
    message = str(raised.value)
    assert message.startswith("keys.toml: ")
    assert all(word in message for word in ["expected", *words]), message
    for secret in (KEY, OTHER, "sk-short", KEY[:8]):
        assert secret not in message
    assert raised.value.__cause__ is None  # what a traceback would show


def test_the_example_of_the_guide():
    guide = Path(__file__).resolve().parents[3] / "docs" / "server.md"
    (example,) = re.findall(r"^```toml\n(.*?)^```$", guide.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    first, second = parse_keys(example.encode(), "keys")
    assert (first.caller.tenant, first.max_cached_blocks, first.tier_blocks) == ("tern-home", 2000, {"disk": 9000})
    assert second.caller.may_choose_salt


def test_a_file_that_is_no_text():
    with pytest.raises(InvalidArgumentError, match="keys: expected TOML"):
        parse_keys(b"\xff\xfe", "keys")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"--keys: expected a file that can be read, got .*: No such file"):
        read_keys(tmp_path / "none")
    with pytest.raises(InvalidArgumentError, match="--keys: expected a file that can be read"):
        read_keys(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX'")
@pytest.mark.parametrize(("mode", "is_warned"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_can_read_is_warned_of(tmp_path, mode, is_warned, caplog):
    file = tmp_path / "keys.toml"
    file.write_text(entry())
    file.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert len(read_keys(file)) == 1
    assert [f"with mode {mode:o}" in record.message for record in caplog.records] == [True] * is_warned
    assert KEY not in caplog.text
