"""Time to the first token of a prompt whose prefix is computed, on the device, on the host, or on a disk."""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from bench.timing import Spread
from kvblocks import Sequence
from kvblocks.engine.engine import Engine
from kvblocks.engine.run.runner import LoadedModel
from kvblocks.engine.tiers.options import TierOptions

PLACES = ("computed", "device", "host", "disk", "disk, keyed", "disk, cold")
SECRET = b"sixteen bytes or more"
TAIL = 8  # tokens behind the prefix, new in every prompt

Milliseconds = dict[str, Spread]


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for a disk cache. It is deleted at the end."""
    path = Path(tempfile.mkdtemp(prefix="kvblocks-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Rounds:
    """One prompt after another, each asked in all places in turn.

    num_prefix_tokens: the tokens of each prompt's prefix. pool_tokens: those of the device's pool.
    """

    def __init__(self, model: LoadedModel, num_prefix_tokens: int, block_size: int = 16) -> None:
        self._model = model
        self._block_size = block_size
        self._num_prefix_tokens = num_prefix_tokens
        self._num_blocks = 2 * num_prefix_tokens // block_size
        self._random = random.Random(1)
        self.samples: dict[str, list[float]] = {place: [] for place in PLACES}
        self.open_ms: list[float] = []
        self.num_loaded_bytes = 0

    def run(self, num_rounds: int) -> Milliseconds:
        """Return the milliseconds to the first token, by place. The first round isn't counted."""
        for number in range(num_rounds + 1):
            self._round(counts=number > 0)
        return {place: Spread(samples) for place, samples in self.samples.items()}

    def _round(self, *, counts: bool) -> None:
        found: dict[str, float] = {}
        prefix = self.tokens(self._num_prefix_tokens)
        with folder() as plain, folder() as keyed:
            engine = self.engine(f"host:{self._num_bytes}", f"disk:{plain}")
            found["computed"] = self.ask(engine, prefix, 0, None)
            found["device"] = self.ask(engine, prefix, self._num_prefix_tokens, None)
            self._settle(engine)
            self._forget_device(engine)
            found["host"] = self.ask(engine, prefix, self._num_prefix_tokens, "host")
            engine.close()
            start = perf_counter()
            engine = self.engine(f"disk:{plain}")
            opened = 1e3 * (perf_counter() - start)
            found["disk"] = self.ask(engine, prefix, self._num_prefix_tokens, "disk")
            self.num_loaded_bytes = engine.offload.traffic()[0].num_bytes["load"] if engine.offload else 0
            engine.close()
            found["disk, cold"] = self._ask_cold(plain, prefix)
            engine = self.engine(TierOptions(f"disk:{keyed}", secret=SECRET))
            self.ask(engine, prefix, 0, None)
            engine.close()
            engine = self.engine(TierOptions(f"disk:{keyed}", secret=SECRET))
            found["disk, keyed"] = self.ask(engine, prefix, self._num_prefix_tokens, "disk")
            engine.close()
        if counts:
            self.open_ms.append(opened)
            for place, value in found.items():
                self.samples[place].append(value)

    def _ask_cold(self, path: Path, prefix: list[int]) -> float:
        """Ask after telling the system to drop the files from the page cache, which it may ignore."""
        os.sync()
        for file in path.iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        engine = self.engine(f"disk:{path}")
        took = self.ask(engine, prefix, self._num_prefix_tokens, "disk")
        engine.close()
        return took

    @property
    def _num_bytes(self) -> int:
        """Bytes of host memory for twice the pool's blocks."""
        config = self._model.config
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self._model.dtype.itemsize
        return 2 * self._num_blocks * self._block_size * per_token

    def engine(self, *tiers: str | TierOptions) -> Engine:
        """Return an engine with room for two prompts, and these tiers."""
        return Engine(self._model, num_blocks=self._num_blocks, block_size=self._block_size, tiers=tiers)

    def ask(self, engine: Engine, prefix: list[int], num_cached: int, tier: str | None) -> float:
        """Return the milliseconds to the first token. Raises ValueError if the prefix doesn't come from `tier`."""
        (completion,) = engine.generate([[*prefix, *self.tokens(TAIL)]], max_tokens=1, ignore_eos=True)
        loaded = {} if tier is None else {tier: num_cached}
        if completion.num_cached_tokens != num_cached or completion.num_loaded_tokens != loaded:
            raise ValueError(f"expected {num_cached} tokens cached, {loaded} loaded, got {completion}")
        return 1e3 * completion.ttft_s

    def _settle(self, engine: Engine) -> None:
        while engine.has_work:
            engine.step()

    def _forget_device(self, engine: Engine) -> None:
        """Evict all blocks from the device, as other prompts would, but without computing any."""
        crowd = Sequence("crowd", self.tokens(self._num_blocks * self._block_size))
        if engine.manager.allocate_slots(crowd) is None:
            raise ValueError("expected all blocks to be free, got too few")
        engine.manager.abort(crowd, 0)

    def tokens(self, number: int) -> list[int]:
        """Return tokens that, most likely, no other call has returned."""
        return [self._random.randrange(2, self._model.config.vocab_size) for _ in range(number)]
