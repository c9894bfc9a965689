"""The page at `/`: what the server says about it, and in a real browser what it shows, asks for and logs."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from browser import MISSING, browser
from server.server_harness import MODEL, Gate, in_background, running_server, tiny_loaded

KEY = "a-key-of-clients"
HOSTILE = """<img src=x onerror=alert(1)> it's "$(id)" \\ {{7*7}}"""
KEEP = os.environ.get("KVBLOCKS_SCREENSHOTS")  # a folder, to look at them
needs_browser = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_loaded(tiny_folder)


@pytest.fixture(scope="module")
def opened():
    with browser() as window:
        yield window


@pytest.fixture
def window(opened):
    """A browser window. After the test its page is closed, and its messages and requests are dropped."""
    yield opened
    opened.open("about:blank")
    opened.said()
    opened.requested()


def test_the_page_is_one_file_without_links_for_whoever_connects(model):
    with running_server(model, api_key=KEY, name=HOSTILE) as server, server.http() as http:
        answer = http.get("/")
        assert http.get("/", headers={"host": "evil.example"}).status_code in {200, 403}
        assert http.post("/").status_code == 405
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "onerror" not in answer.text
    assert KEY not in answer.text
    assert re.findall(r"(?:src|href|action|url\()[=\"']*([a-z]+:[^\"')]*)", answer.text) == ["data:,"]
    assert "//" not in re.sub(r"^\s*//.*$", "", answer.text, flags=re.MULTILINE)
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy)
    assert "http:" not in str(policy)


def test_the_page_is_for_the_servers_own_names_only(model):
    with running_server(model) as server, server.http() as http:
        assert http.get("/", headers={"host": "evil.example"}).status_code == 403


def no_noise(window, server):
    """Whether the console is empty, and the server alone was asked."""
    assert window.said() == []
    asked = [url for url in window.requested() if not url.startswith(("data:", "chrome", "about:"))]
    assert asked
    assert all(url.startswith(f"{server.url}/") for url in asked), asked
    return {url.removeprefix(server.url) for url in asked}


def fits(window):
    return window.run("return document.documentElement.scrollWidth <= window.innerWidth")


def keep(window, name):
    if KEEP:
        window.screenshot(Path(KEEP) / f"{name}.png")


@needs_browser
def test_a_browser_shows_what_is_served_and_how_full_it_is(model, window, tmp_path):
    disk = {"host_cache": "256KiB", "disk_cache": str(tmp_path / "disk"), "disk_cache_size": "4MiB"}
    with running_server(model, cache={"num_blocks": 64, **disk}) as server, server.http() as http:
        gate = Gate(server.engine)
        window.resize(1280, 900)
        window.open(f"{server.url}/")
        window.wait_for("return document.getElementById('state').className === 'good'")
        assert window.text("model") == MODEL
        assert "1,024 tokens" in window.text("context")
        assert window.text("hit-rate") == "none yet"
        assert window.text("filled") == "0.0 % filled"
        prompt = list(range(10, 200))
        for _ in range(2):
            assert http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).status_code == 200
        window.wait_for("return document.getElementById('requests').textContent.includes('2 finished')")
        assert float(window.text("hit-rate").split()[0]) > 40
        blocks = re.match(r"0 of 64 blocks in use, (1\d) cached, 0 pinned", window.text("blocks"))
        assert window.text("filled") == f"{100 * int(blocks[1]) / 64:.1f} % filled"
        tiers = "return [...document.querySelectorAll('#tiers h2')].map(element => element.textContent)"
        assert sorted(window.run(tiers)) == ["disk", "host"]
        gate.shut()
        asked = in_background(lambda: http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3}))
        window.wait_for("return document.getElementById('open').textContent === '1 open'")
        window.wait_for("return parseInt(document.getElementById('blocks').textContent) > 10")
        keep(window, "wide-light")
        gate.open()
        asked.join(60)
        assert fits(window)
        curl = shlex.split(window.text("curl").replace("\\\n", " "))
        assert json.loads(curl[curl.index("-d") + 1])["model"] == MODEL
        window.prefer("dark")
        keep(window, "wide-dark")
        window.resize(390, 844)
        assert fits(window)
        keep(window, "narrow-dark")
        window.prefer("light")
        keep(window, "narrow-light")
        assert no_noise(window, server) == {"/", "/health", "/metrics", "/v1/models"}
        exec(compile(window.text("python"), "page", "exec"), {})
        server.wait_until_idle()
    window.wait_for("return document.getElementById('state').textContent.startsWith('no answer')")


@needs_browser
def test_a_browser_is_told_that_a_key_is_needed_and_names_are_text(model, window, monkeypatch):
    with running_server(model, api_key=KEY, name=HOSTILE) as server:
        window.resize(390, 844)
        window.open(f"{server.url}/")
        window.wait_for("return !document.getElementById('ask-key').hidden")
        window.wait_for("return document.getElementById('blocks').textContent.includes('of 256 blocks')")
        assert "Bearer $KVBLOCKS_API_KEY" in window.text("curl")
        assert no_noise(window, server) == {"/", "/health", "/metrics"}
        assert fits(window)
        keep(window, "narrow-key")
        submit = "document.getElementById('key').value = arguments[0]; document.querySelector('form').requestSubmit()"
        window.run(submit, "another")
        window.wait_for("return document.getElementById('key-answer').textContent.includes('know this key')")
        assert all("status of 401" in line for line in window.said())
        window.run(submit, KEY)
        window.wait_for("return document.getElementById('ask-key').hidden")
        assert window.text("model") == HOSTILE
        assert window.run("return document.querySelectorAll('img').length") == 0
        assert KEY not in window.run("return document.documentElement.outerHTML")
        curl = shlex.split(window.text("curl").replace("\\\n", " "))
        assert json.loads(curl[curl.index("-d") + 1])["model"] == HOSTILE
        monkeypatch.setenv("KVBLOCKS_API_KEY", KEY)
        exec(compile(window.text("python"), "page", "exec"), {})
        assert fits(window)
        keep(window, "narrow-hostile")
        window.requested()
        window.wait_for("return document.getElementById('requests').textContent.includes('1 finished')")
        assert no_noise(window, server) <= {"/health", "/metrics"}
        server.wait_until_idle()


def type_and_enter(window, element_id, text, enters=True):
    """Type as a keyboard does: the element gets the text, and a key that the page may take."""
    script = """
const field = document.getElementById(arguments[0]);
field.focus();
field.value = arguments[1];
if (arguments[2]) field.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true, cancelable: true }));
return document.activeElement === field;
"""
    assert window.run(script, element_id, text, enters)


COSTS = "return [...document.querySelectorAll('.cost')].map(line => line.textContent)"
SETTLED = (
    "return !document.getElementById('send').disabled && document.querySelectorAll('.cost').length === arguments[0]"
)


def chatted(window, number):
    """The cost lines, once there are so many and nothing is under way."""
    window.wait_for(SETTLED.replace("arguments[0]", str(number)))
    return window.run(COSTS)


@needs_browser
def test_a_chat_shows_what_each_answer_cost_and_why_it_missed(model, window):
    with running_server(model, cache={"deterministic": True}, api_key=KEY) as server:
        window.resize(390, 844)
        window.open(f"{server.url}/")
        window.wait_for("return !document.getElementById('ask-key').hidden")
        type_and_enter(window, "question", "Hello?")
        window.wait_for("return document.getElementById('turns').textContent.includes('with a key of this server')")
        assert all("status of 401" in line for line in window.said())
        submit = "document.getElementById('key').value = arguments[0]; document.querySelector('form').requestSubmit()"
        window.run(submit, KEY)
        window.wait_for("return document.getElementById('ask-key').hidden")
        window.run("document.getElementById('again').click()")
        type_and_enter(window, "system", "It is 2026-11-25 20:10:11. " + "The cat is in the hat. " * 5, enters=False)
        type_and_enter(window, "question", "Who <b>is</b> there?")
        (first,) = chatted(window, 1)
        assert re.fullmatch(r"first token after [\d.]+ s, .*, 0 of \d+ prompt tokens from the cache \(0%\)", first)
        type_and_enter(window, "question", "And?")
        second = chatted(window, 2)[1]
        share = re.search(r"(\d+) of (\d+) prompt tokens from the cache \((\d+)%\): (\d+) from device", second)
        assert int(share[1]) == int(share[4]) > 96
        assert window.run("return document.querySelectorAll('#turns b').length") == 0  # text is text
        assert fits(window)
        type_and_enter(window, "system", "It is 2026-11-25 20:10:59. " + "The cat is in the hat. " * 5, enters=False)
        type_and_enter(window, "question", "Who <b>is</b> there?")
        chatted(window, 3)
        window.wait_for("return document.querySelectorAll('.why').length > 0")
        why = window.run("return [...document.querySelectorAll('.why')].at(-1).textContent")
        assert "a time or date has changed: '2026-11-25 20:10:11' is now '2026-11-25 20:10:59', in system" in why
        assert '"1" before, "5" now' in why
        assert fits(window)
        keep(window, "narrow-chat")
        window.resize(1280, 900)
        window.prefer("dark")
        keep(window, "wide-chat-dark")
        window.prefer("light")
        asked = no_noise(window, server)
        assert {"/v1/chat/completions", "/v1/cache/explain"} <= asked
        server.wait_until_idle()


@needs_browser
def test_an_answer_is_ended_by_a_button_and_computed_no_further(model, window):
    with running_server(model) as server:
        gate = Gate(server.engine)
        gate.shut()
        window.open(f"{server.url}/")
        type_and_enter(window, "question", "Who?")
        gate.wait_for_step()
        window.wait_for("return !document.getElementById('stop').hidden")
        window.run("document.getElementById('stop').click()")
        window.wait_for("return document.getElementById('turns').textContent.includes('The answer was ended.')")
        gate.open()
        server.wait_until_idle()
        assert server.service.metrics.counts()["cancelled"] == 1
        window.run("document.getElementById('again').click()")
        assert window.run("return document.getElementById('turns').children.length") == 0
        assert window.run("return document.activeElement.id") == "question"


@needs_browser
def test_the_page_of_endpoints_lists_them(model, window):
    with running_server(model) as server:
        window.resize(390, 844)
        window.open(f"{server.url}/docs")
        window.wait_for("return document.getElementById('paths').children.length > 30")
        assert "/v1/messages" in window.text("paths")
        assert fits(window)
        assert no_noise(window, server) == {"/docs", "/openapi.json"}
