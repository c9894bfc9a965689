"""LoRA adapters, played before a server of ours."""

import threading
import zlib
from contextlib import contextmanager

import torch
from server.server_harness import MODEL
from verify.proxy import Played

_STRENGTH = 0.05  # the most by which an adapter scales a number of a norm


class PlayedAdapters(Played):
    """An adapter scales the norms before each attention, so that K and V change. Its requests get a salt of their own.

    names: of adapters that are there from the beginning. is_stale: a fault, requests find what was cached with other
    weights: of an earlier adapter of that name, and for those from the beginning, of the model.
    """

    def __init__(self, server, names=(), *, is_stale=False):
        self.server, self.is_stale = server, is_stale
        self.norms = [layer.input_norm for layer in server.engine.model.weights.layers]
        self.own = [norm.clone() for norm in self.norms]
        self.now = None
        self.paths = {name: name for name in names}
        self.first = set(names)
        self.lock = threading.Lock()

    def listed(self, models):
        (model,) = models["data"]
        return {"data": [model, *(model | {"id": name, "parent": model["id"]} for name in self.paths)]}

    def command(self, path, body):
        if path == "/v1/load_lora_adapter":
            self.paths[body["lora_name"]] = body["lora_path"]
            return "loaded"
        if path == "/v1/unload_lora_adapter":
            del self.paths[body["lora_name"]]
            return "unloaded"
        return None

    @contextmanager
    def translated(self, path, body):
        name = body.get("model")
        with self.lock:
            self.server.on_thread(lambda: self._set(self.paths.get(name)))
            if name in self.paths:
                body["model"] = MODEL
                if not self.is_stale:
                    body["cache_salt"] = f"{body.get('cache_salt')}, {name} from {self.paths[name]}"
                elif name not in self.first:
                    body["cache_salt"] = f"{body.get('cache_salt')}, {name}"
            yield path, body

    def _set(self, path):
        if path == self.now:
            return
        self.now = path
        random = torch.Generator().manual_seed(zlib.crc32(path.encode())) if path else None
        for norm, own in zip(self.norms, self.own, strict=True):
            norm.copy_(own * (1 + _STRENGTH * torch.rand(own.shape, generator=random)) if random else own)
