"""Callers: keys, rights, and salts that no other caller can name."""

import hmac
import itertools

import pytest

from kvblocks import KVCacheManager
from kvblocks.errors import InvalidArgumentError
from kvblocks.server.access import callers
from kvblocks.server.access.callers import TENANT_SALTS, Caller, Callers, TenantKey, digest_of, set_quotas
from kvblocks.server.errors import ApiError

A, B = Caller("a"), Caller("b", may_choose_salt=False)
KEYS = Callers([(digest_of("key-a"), A), (digest_of("key-b"), B)], None)


def headers(*values):
    return [(b"authorization", value) for value in values]


@pytest.mark.parametrize("value", [b"Bearer key-a", b"bearer key-a", b"BEARER  key-a", b" bEaReR key-a "])
def test_a_key_is_known_whatever_the_case_of_bearer(value):
    assert KEYS.find(headers(value)) is A


@pytest.mark.parametrize(
    "values",
    [
        *([], [b""], [b"key-a"], [b"Basic key-a"], [b"Bearer"], [b"Bearer "], [b"Bearer key-a key-a"]),
        *([b"Bearer KEY-A"], [b"Bearer key-"], [b"Bearer key-aa"], [b"Bearer \xff"]),
        [b"Bearer key-a", b"Bearer key-a"],
    ],
)
def test_others_are_refused(values):
    with pytest.raises(ApiError, match="expected 'Authorization: Bearer KEY'") as raised:
        KEYS.find(headers(*values))
    assert raised.value.status == 401
    assert raised.value.headers["WWW-Authenticate"] == "Bearer"
    assert "key-" not in raised.value.message


def test_all_keys_are_compared_whichever_it_is(monkeypatch):
    compared = []

    def compare(one, other):
        compared.append(other)
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(callers, "hmac", type("hmac", (), {"compare_digest": staticmethod(compare)}))
    for value in (b"Bearer key-a", b"Bearer key-b", b"Basic key-a"):
        compared.clear()
        try:
            KEYS.find(headers(value))
        except ApiError:
            assert value.startswith(b"Basic")
        assert compared == [digest_of("key-a"), digest_of("key-b")]


def test_where_anyone_may_ask_a_key_that_nobody_knows_is_as_good_as_none():
    anyone, operator = Caller(), Caller(is_operator=True)
    open_to_all = Callers([(digest_of("admin"), operator)], anyone)
    assert open_to_all.find([]) is open_to_all.find(headers(b"Bearer none")) is anyone
    assert open_to_all.find(headers(b"Bearer admin")) is operator


def test_no_two_callers_name_the_same_salt():
    chosen = [None, "a", "b", "/", "a/b", "/a", "", TENANT_SALTS, TENANT_SALTS + "a", TENANT_SALTS + "a/b", "kvblocks/"]
    askers = [Caller(), Caller("a"), Caller("b"), Caller("ab"), Caller("a.b"), Caller("x", may_choose_salt=False)]
    salts, refusals = {}, []
    for asker, salt in itertools.product(askers, chosen):
        try:
            salts[asker.tenant, salt] = asker.salt_for(salt)
        except ApiError as error:
            refusals.append((error.status, error.param))
    assert set(refusals) == {(400, "cache_salt")}
    assert len(set(salts.values())) == len(salts)
    assert salts[None, None] is None
    assert salts[None, "a"] == "a"
    assert (None, TENANT_SALTS + "a") not in salts
    assert [key for key in salts if key[0] == "x"] == [("x", None)]
    assert all(salt.startswith(TENANT_SALTS) for (tenant, _), salt in salts.items() if tenant is not None)


def test_who_holds_the_operators_key_may_name_any_salt():
    assert Caller(is_operator=True, sees_others=True).salt_for(TENANT_SALTS + "a") == Caller("a").salt_for(None)
    with pytest.raises(ApiError):
        Caller(is_operator=True).salt_for(TENANT_SALTS + "a")  # an operator for want of one


def test_quotas_are_the_managers():
    manager = KVCacheManager(10, block_size=4)
    set_quotas(manager, [TenantKey(A, b"", 5), TenantKey(B, b"", None)])
    assert [(quota.salt, quota.max_cached_blocks) for quota in manager.quotas] == [(A.salt_for(None), 5)]
    with pytest.raises(InvalidArgumentError, match=r"tier_quotas of 'a': expected tiers .* \(none\), got disk"):
        set_quotas(manager, [TenantKey(A, b"", None, {"disk": 5})])
