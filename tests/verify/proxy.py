"""A proxy before a server of ours, which plays what the engine has none of: adapters, images."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Played:
    """What a proxy plays; this one nothing."""

    def listed(self, models):
        """What it lists instead of the server's models."""
        return models

    def command(self, path, body):
        """Do what is posted to a path of its own, and return the answer; None: there is no such path."""

    @contextmanager
    def translated(self, path, body):
        """The path and body of a request for the server, as long as that answers."""
        yield path, body

    def answer(self, path, found):
        """The server's answer as a client is to see it."""
        return found


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        found = self._ask("GET", self.path, None)
        self._reply(found.status_code, json.dumps(self.server.played.listed(found.json())).encode())

    def do_POST(self):
        played, body = self.server.played, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        done = played.command(self.path, body)
        if done is not None:
            self._reply(200, done.encode(), "text/plain")
            return
        with played.translated(self.path, body) as (path, translated):
            found = self._ask("POST", path, translated)
        content = found.content
        if found.status_code == 200 and not translated.get("stream"):
            content = json.dumps(played.answer(self.path, found.json())).encode()
        self._reply(found.status_code, content, found.headers["content-type"])

    def _ask(self, method, path, body):
        with self.server.behind.http() as http:
            return http.request(method, path, json=body)

    def _reply(self, status, content, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def proxy_of(server, played):
    """The URL of a proxy before a running server."""
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    proxy.played, proxy.behind = played, server
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}"
    finally:
        proxy.shutdown()
        thread.join(60)
        proxy.server_close()
