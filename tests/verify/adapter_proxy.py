"""A server of ours with adapters that are loaded at runtime, which it has none of: a proxy before it plays them.

An adapter changes the model's norms in place, so that it changes K and V. Its requests get a salt of their own.
"""

import json
import threading
import zlib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from server.server_harness import MODEL


class Adapters:
    """At most one is loaded. is_stale: a fault, adapters of one name share what is cached, whatever their weights."""

    def __init__(self, server, is_stale):
        self.server, self.is_stale = server, is_stale
        self.norms = [layer.input_norm for layer in server.engine.model.weights.layers]
        self.own = [norm.clone() for norm in self.norms]
        self.loaded = {}

    def load(self, name, path):
        assert not self.loaded
        self.loaded[name] = path
        random = torch.Generator().manual_seed(zlib.crc32(path.encode()))
        self._set([norm * (1 + torch.rand(norm.shape, generator=random)) for norm in self.own])

    def unload(self, name):
        del self.loaded[name]
        self._set(self.own)

    def _set(self, norms):
        def copy():
            for norm, values in zip(self.norms, norms, strict=True):
                norm.copy_(values)

        self.server.on_thread(copy)

    def translated(self, body):
        """A request of an adapter as one of the model, with a salt that tells adapters apart."""
        name = body.get("model")
        if name in self.loaded:
            told = name if self.is_stale else f"{name} from {self.loaded[name]}"
            body |= {"model": MODEL, "cache_salt": f"{body.get('cache_salt')}, {told}"}
        return body


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._pass_on("GET", None)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        adapters = self.server.adapters
        if self.path == "/v1/load_lora_adapter":
            adapters.load(body["lora_name"], body["lora_path"])
            self._answer(200, b"loaded", "text/plain")
        elif self.path == "/v1/unload_lora_adapter":
            adapters.unload(body["lora_name"])
            self._answer(200, b"unloaded", "text/plain")
        else:
            self._pass_on("POST", adapters.translated(body))

    def _pass_on(self, method, body):
        with self.server.adapters.server.http() as http:
            found = http.request(method, self.path, json=body)
        self._answer(found.status_code, found.content, found.headers["content-type"])

    def _answer(self, status, content, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def with_adapters(server, *, is_stale=False):
    """The URL of a proxy before a running server."""
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    proxy.adapters = Adapters(server, is_stale)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}"
    finally:
        proxy.shutdown()
        thread.join(60)
        proxy.server_close()
