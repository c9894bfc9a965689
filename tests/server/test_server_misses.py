"""Why a request missed, over HTTP: what the cache knows of it, where it parts, and that guesses tell nothing."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from server.server_harness import MODEL, Gate, running_server, tiny_loaded, wait_for

from kvblocks.cli import app as cli
from kvblocks.server.access.callers import Caller, TenantKey, digest_of

SYSTEM = "the cat is in the hat. " * 10
KEYS = {name: f"sk-{name}-0123456789" for name in ("one", "two")}
ADMIN = "the-operators-own-key"


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_loaded(tiny_folder)


@pytest.fixture
def server(model):
    with running_server(model, cache={"num_blocks": 64}) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def http(server):
    with server.http() as http:
        yield http


def ask(http, question="Who?", system=SYSTEM, headers=None, **options):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0, **options}
    response = http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def explain(http, headers=None, **body):
    response = http.post("/v1/cache/explain", json=body, headers=headers)
    assert response.status_code == 200, response.text
    (found,) = response.json()["prompts"]
    return found


def fill(http, number=8, headers=None):
    for index in range(number):
        prompt = [(token * 7 + index) % 250 for token in range(180)]
        assert (
            http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}, headers=headers).status_code == 200
        )


def test_evicted_says_when_for_whom_and_that_no_tier_has_it(http):
    ask(http)
    fill(http)
    cache = explain(http, request_id=ask(http)["id"])["cache"]
    assert (cache["reason"], cache["evicted_from"], cache["still_in"]) == ("evicted", "device", [])
    assert cache["num_blocks_since"] > 20
    assert 0 <= cache["seconds_since"] < 600
    assert cache["evicted_for"] is None  # for a request without a tenant


def test_evicted_from_the_device_but_still_in_a_tier(model, http):
    del http
    with running_server(model, cache={"num_blocks": 64, "host_cache": "8MiB"}) as server, server.http() as http:
        ask(http)
        fill(http)
        server.wait_until_idle()
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Who?"}]
        cache = explain(http, messages=messages)["cache"]
        assert (cache["reason"], cache["still_in"]) == ("evicted", ["host"])


def test_evicted_from_a_tier_says_from_which_and_for_whom(model, http, capsys):
    """A prompt is evicted from the device, then from the host: first its end, at last all of it."""
    del http
    cache = {"num_blocks": 32, "host_cache": "384KiB", "num_history_blocks": 1000}
    with running_server(model, cache=cache) as server, server.http() as http:
        old = [(token * 3) % 250 for token in range(16 * 20)]
        body = {"prompt": old, "max_tokens": 1}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert explain(http, token_ids=old)["cache"]["reason"] == "hit"
        seen = []
        for number in range(20):
            one = [(token * 7 + number) % 250 for token in range(16 * 4)]
            asked = {"prompt": one, "max_tokens": 1, "cache_salt": "another"}
            assert http.post("/v1/completions", json=asked).status_code == 200
            server.wait_until_idle()
            seen.append(explain(http, token_ids=old)["cache"])
        places = [(cache.get("evicted_from"), tuple(cache.get("still_in") or ())) for cache in seen]
        assert ("device", ("host",)) in places
        assert places[-1] == ("host", ())
        (*_, last) = [cache for cache in seen if cache.get("behind_tiers")]
        behind = last["behind_tiers"]
        assert (behind["removed"], behind["evicted_from"]) == ("evicted", "host")
        assert last["num_cached_blocks"] < behind["block"] < 20
        assert 0 <= behind["seconds_since"] < 600
        assert seen[-1]["reason"] == "evicted"
        found = explain(http, request_id=http.post("/v1/completions", json=body).json()["id"])
        assert "block 0 was evicted from 'host' (" in found["text"]
        with pytest.raises(SystemExit):
            cli.main(["cache", "explain", "--last", "--url", server.url])
        assert ", evicted from host; still in: no tier" in capsys.readouterr().out


def test_a_tenant_is_told_that_a_tier_evicted_for_another(model, http):
    del http
    keys = tuple(TenantKey(Caller(tenant=name), digest_of(key)) for name, key in KEYS.items())
    cache = {"num_blocks": 32, "host_cache": "384KiB", "num_history_blocks": 1000}
    with running_server(model, cache=cache, keys=keys, admin_key=ADMIN) as server, server.http() as http:
        one, two = ({"authorization": f"Bearer {KEYS[name]}"} for name in ("one", "two"))
        ask(http, headers=one)
        for _ in range(8):
            fill(http, 8, two)
            server.wait_until_idle()
        told = ask(http, headers=one)
        mine = explain(http, one, request_id=told["id"])
        theirs = explain(http, {"authorization": f"Bearer {ADMIN}"}, request_id=told["id"])
        assert (mine["cache"]["evicted_from"], mine["cache"]["evicted_for"]) == ("host", "another")
        assert theirs["cache"]["evicted_for"] == "two"
        assert "isn't cached: evicted from 'host'" in mine["text"]
        assert "two" not in str(mine)


def test_pinned_out_if_pins_hold_more_than_were_taken_since(http):
    ask(http)
    pinned = http.post("/v1/cache/pins", json={"token_ids": [7] * 16 * 30, "priority": 100}).json()
    body = {"prompts": [{"token_ids": [7] * 16 * 30}]}
    assert http.post("/v1/cache/warm", json=body).status_code == 200
    fill(http, 3)
    held = http.get("/v1/cache/pins").json()["pins"][0]["num_held_blocks"]
    cache = explain(http, request_id=ask(http)["id"])["cache"]
    assert held == pinned["num_blocks"] == 30
    assert cache["reason"] == ("pinned_out" if cache["num_blocks_since"] < 30 else "evicted")
    assert cache["num_pinned_blocks"] == 30
    assert cache["num_blocks_since"] < 30  # so that it was the pin


def test_over_quota_names_the_quota(model):
    caller = Caller(tenant="one", may_choose_salt=False)
    keys = (TenantKey(caller, digest_of(KEYS["one"]), max_cached_blocks=20),)
    headers = {"authorization": f"Bearer {KEYS['one']}"}
    with running_server(model, cache={"num_blocks": 64}, keys=keys) as server, server.http() as http:
        ask(http, headers=headers)
        fill(http, 6, headers)
        cache = explain(http, headers, request_id=ask(http, headers=headers)["id"])["cache"]
        assert (cache["reason"], cache["evicted_for"]) == ("over_quota", "own")


def test_a_dead_step_never_wrote_what_it_had_to(server, http):
    gate = Gate(server.engine)
    gate.failure = RuntimeError("a fault of a test")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Who?"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=body).status_code == 500
    assert explain(http, request_id=ask(http)["id"])["cache"]["reason"] == "never_written"


def test_another_salt_is_told_to_who_may_know(http):
    ask(http, cache_salt="a")
    cache = explain(http, request_id=ask(http)["id"])["cache"]
    assert cache["reason"] == "salt_differs"


def test_waiting_would_have_hit(server, http):
    """A long prompt is being computed in parts when an equal one comes."""
    gate = Gate(server.engine)
    prompt = [(token * 5) % 250 for token in range(400)]
    gate.shut()
    with server.http() as other, ThreadPoolExecutor(2) as threads:
        first = threads.submit(other.post, "/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        gate.wait_for_step()
        second = threads.submit(http.post, "/v1/completions", json={"prompt": prompt, "max_tokens": 1})

        wait_for(lambda: server.service.num_open == 2)
        gate.open()
        assert first.result(60).status_code == 200
        found = explain(http, request_id=second.result(60).json()["id"])
    assert found["cache"]["num_pending_tokens"] > 300


def test_a_time_stamp_in_the_system_text_is_found_and_decoded(http, server, capsys):
    for second in ("11", "59"):
        asked = ask(http, system=f"It is 2026-11-25 20:10:{second}. {SYSTEM}")
    found = explain(http, request_id=asked["id"])
    compared = found["compared"]
    assert (compared["differs"], compared["item"]) == ("system", "system")
    assert compared["text"] == "a time or date has changed: '2026-11-25 20:10:11' is now '2026-11-25 20:10:59'"
    assert (compared["before"]["text"], compared["after"]["text"]) == ("1", "5")
    assert compared["context"].endswith("20:10:")
    assert compared["num_reusable_tokens"] <= compared["num_common_tokens"]
    assert found["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
    assert found["prompt_cache_diagnostics"]["reason"] == "input_changed"
    with pytest.raises(SystemExit):
        cli.main(["cache", "explain", "--last", "--url", server.url])
    said = capsys.readouterr().out
    assert "a time or date has changed" in said
    assert "first different token, after" in said


def test_a_conversation_is_found_by_its_key(http, server, capsys):
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "wait")]
    ask(http, tools=tools, prompt_cache_key="chat-1")
    ask(http, system="Something quite different.", prompt_cache_key="chat-2")
    ask(http, tools=tools[::-1], prompt_cache_key="chat-1")
    compared = explain(http, prompt_cache_key="chat-1")["compared"]
    assert compared["text"] == "the tools are the same, but in another order"
    assert explain(http, prompt_cache_key="chat-2")["compared"] is None
    with pytest.raises(SystemExit):
        cli.main(["cache", "explain", "--conversation", "chat-1", "--url", server.url])
    assert "in another order, in tools[0] (wait)" in capsys.readouterr().out
    assert http.post("/v1/cache/explain", json={"prompt_cache_key": "chat-3"}).status_code == 404


def test_an_answer_says_where_it_parts_if_it_is_asked(http):
    first = ask(http)
    options = {"prompt_cache_options": {"comparison_response_id": first["id"]}}
    assert ask(http, **options)["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    told = ask(http, system="Another.", **options)["prompt_cache_diagnostics"]
    assert (told["type"], told["reason"]) == ("cache_miss", "input_changed")
    unknown = {"prompt_cache_options": {"comparison_response_id": "chatcmpl-unknown"}}
    assert ask(http, **unknown)["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


def test_what_was_forgotten_is_compared_with_nothing(http):
    first = ask(http, cache_salt="a")
    ask(http, cache_salt="a", system="Another.")
    assert http.post("/v1/cache/forget", json={"cache_salt": "a"}).status_code == 200
    again = ask(http, cache_salt="a", prompt_cache_options={"comparison_response_id": first["id"]})
    assert again["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    assert explain(http, request_id=again["id"])["compared"] is None


# --- guesses ---------------------------------------------------------------------------------------------------------

SECRET = "The launch code of the tern is 31415926. " * 6


@pytest.fixture(scope="module")
def guarded(model):
    """Two tenants and an operator."""
    keys = tuple(TenantKey(Caller(tenant=name), digest_of(key)) for name, key in KEYS.items())
    with running_server(model, cache={"num_blocks": 256}, keys=keys, admin_key=ADMIN) as running:
        yield running
        running.wait_until_idle()


def test_guesses_at_another_tenants_prompts_tell_nothing(guarded):
    """Whatever is guessed, right or wrong, is answered the same: as if nobody else were there."""
    one, two = ({"authorization": f"Bearer {KEYS[name]}"} for name in ("one", "two"))
    with guarded.http() as http:
        told = ask(http, "Which code?", SECRET, one, prompt_cache_key="launch")
        right = ("Which code?", SECRET, told["id"], "launch")
        wrong = ("Which mode?", SECRET.replace("31415926", "27182818"), "chatcmpl-0", "lunch")
        answers = []
        for question, system, known_id, session in (right, wrong):
            for path_body in ({"request_id": known_id}, {"prompt_cache_key": session}):
                response = http.post("/v1/cache/explain", json=path_body, headers=two)
                assert response.status_code == 404
                assert "31415926" not in response.text
            options = {"prompt_cache_options": {"comparison_response_id": known_id}, "prompt_cache_key": f"b-{session}"}
            guess = ask(http, question, system, two, **options)
            assert guess["usage"]["prompt_tokens_details"]["cached_tokens"] < 40  # its own first guess, at most
            record = explain(http, two, request_id=guess["id"])
            answers.append(
                (guess["prompt_cache_diagnostics"], record["cause"], record["compared"], record["cache"]["reason"])
            )
        assert answers[0] == answers[1]
        assert answers[0][0] == {"type": "comparison_response_not_found"}
        assert explain(http, two, last=True)["compared"] is None
        before = explain(http, two, messages=[{"role": "system", "content": SECRET[:-1] + "!"}])
        assert before["cache"]["reason"] == "never_cached"
        operator = {"authorization": f"Bearer {ADMIN}"}
        assert explain(http, operator, request_id=told["id"])["cause"] in {"never cached", "partly equal"}


def test_clients_that_share_a_key_name_a_request_by_its_id(model):
    with running_server(model, api_key=KEYS["one"], admin_key=ADMIN) as server, server.http() as http:
        headers = {"authorization": f"Bearer {KEYS['one']}"}
        ask(http, system=SECRET, headers=headers, prompt_cache_key="launch")
        for body in ({"last": True}, {"prompt_cache_key": "launch"}):
            response = http.post("/v1/cache/explain", json=body, headers=headers)
            assert response.status_code == 400
        later = ask(http, system=SECRET.replace("3", "4"), headers=headers)
        assert explain(http, headers, request_id=later["id"])["compared"] is None
