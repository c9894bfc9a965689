"""Web pages of other origins (CORS): none may use the server unless its origin is named, and then no other."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from browser import MISSING, browser
from server.server_harness import HELLO, in_background, running_server, tiny_loaded

from kvblocks.server.access.origins import is_origin

PAGE = "https://app.example"
CORS = "access-control-"


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_loaded(tiny_folder)


@pytest.fixture(scope="module")
def server(model):
    with running_server(model, allowed_origins=(PAGE, "http://localhost:3000"), api_key="a-key") as running:
        yield running


@pytest.fixture
def http(server):
    with server.http() as client:
        yield client


def ask_first(http, origin, method="POST", headers="authorization,content-type,x-stainless-os"):
    """What a browser asks before it sends a page's request."""
    asked = {f"{CORS}request-method": method, f"{CORS}request-headers": headers}
    return http.options("/v1/completions", headers={"origin": origin, **asked})


def cors_of(response):
    return {name for name in response.headers if name.startswith(CORS)}


def test_without_the_option_no_page_may_do_anything(model):
    with running_server(model) as server, server.http() as http:
        for response in (
            ask_first(http, PAGE),
            http.get("/health", headers={"origin": PAGE}),
            http.post("/v1/completions", json=HELLO, headers={"origin": PAGE}),
        ):
            assert cors_of(response) == set()


@pytest.mark.parametrize("origin", [PAGE, "http://localhost:3000"])
def test_a_page_of_a_named_origin_may_ask_and_read_answers_and_errors(http, origin):
    preflight = ask_first(http, origin)
    assert preflight.status_code == 200
    assert preflight.headers[f"{CORS}allow-origin"] == origin
    assert "x-stainless-os" in preflight.headers[f"{CORS}allow-headers"]
    assert "POST" in preflight.headers[f"{CORS}allow-methods"]
    assert f"{CORS}allow-credentials" not in preflight.headers
    key = {"authorization": "Bearer a-key"}
    for headers, status in ((key, 200), ({}, 401)):
        response = http.post("/v1/completions", json=HELLO, headers={"origin": origin, **headers})
        assert response.status_code == status
        assert response.headers[f"{CORS}allow-origin"] == origin
        assert "origin" in response.headers["vary"].lower()
    streamed = http.post("/v1/completions", json={**HELLO, "stream": True}, headers={"origin": origin, **key})
    assert streamed.headers[f"{CORS}allow-origin"] == origin
    assert "x-request-id" in streamed.headers[f"{CORS}expose-headers"]


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "https://app.example.evil.example",
        "http://app.example",
        "https://app.example:8443",
        "null",
        "https://x.app.example",
    ],
)
def test_a_page_of_another_origin_may_not(http, origin):
    refused = ask_first(http, origin)
    assert refused.status_code == 403
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("origin_not_allowed", "permission_error")
    assert origin in error["message"]
    assert f"{CORS}allow-origin" not in refused.headers
    assert f"{CORS}allow-origin" not in http.get("/health", headers={"origin": origin}).headers


def test_a_preflight_is_no_way_around_the_key(http):
    assert http.options("/v1/completions", headers={"origin": PAGE}).status_code == 401
    assert ask_first(http, PAGE, method="PUT").status_code == 403


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PAGE, True),
        ("http://[::1]:3000", True),
        ("http://127.0.0.1:3000", True),
        ("vscode-webview://abc", True),
        ("*", False),
        ("null", False),
        ("", False),
        ("https://app.example/path", False),
        ("http://app.example:80", False),
        ("http://app.example:8080", True),
        ("https://user@app.example", False),
        ("https://app.example\n", False),
    ],
)
def test_origins_are_as_browsers_send_them(text, expected):
    assert is_origin(text) is expected


@pytest.mark.exhaustive
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_in_a_real_browser_a_page_of_a_named_origin_alone_gets_an_answer(model):
    class Blank(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()

        def log_message(self, *_):
            pass

    asks = """
return fetch(arguments[0], {method: "POST", body: arguments[1],
                            headers: {"content-type": "application/json", "authorization": "Bearer a-key"}})
    .then(answer => answer.status, error => error.name)"""
    with ThreadingHTTPServer(("127.0.0.1", 0), Blank) as pages, browser() as window:
        in_background(pages.serve_forever)
        page = f"http://127.0.0.1:{pages.server_port}"
        for origins, expected in (((page,), 200), ((PAGE,), "TypeError"), ((), "TypeError")):
            with running_server(model, allowed_origins=origins, api_key="a-key") as server:
                window.open(page)
                assert window.run(asks, f"{server.url}/v1/completions", json.dumps(HELLO)) == expected
        pages.shutdown()
