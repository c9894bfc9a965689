"""The drivers of the peers, by the peers' own public calls. A peer that isn't installed is named and left out."""

import importlib

from bench.core.driver import Driver

PEERS = {
    "vllm": "bench.peers.vllm:VLLM",
    "sglang": "bench.peers.sglang:SGLang",
    "dynamo": "bench.peers.dynamo:Dynamo",
    "nano": "bench.peers.nano:NanoVLLM",
}


def load(name: str) -> Driver:
    """Return the driver of peer `name`. Raises ImportError when the peer isn't installed."""
    module, _, driver = PEERS[name].partition(":")
    made: Driver = getattr(importlib.import_module(module), driver)()
    return made
