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
