"""How a mirror grows with workers and blocks: its memory, and the time of a lookup."""

import gc
import statistics
import time
import tracemalloc
from random import Random
from typing import Any

from kvblocks.wire.codecs import BlockStored, EventBatch
from kvblocks.wire.convert import Converter
from kvblocks.wire.mirror import EventMirror

NUM_SHARED, PROMPT_BLOCKS, NUM_LOOKUPS = 64, 256, 200
SHAPES = tuple((workers, blocks) for workers in (1, 8, 16, 32, 64) for blocks in (1_000, 10_000))


def measure_growth(shapes: tuple[tuple[int, int], ...] = SHAPES) -> list[dict[str, Any]]:
    """Return a row for each number of workers and of blocks that each of them has cached.

    lookup_us: the median time to look up a prompt of 256 blocks. Every worker has the first 64 of them, and one worker
    has all. It is processor time, since others may use the machine.
    """
    return [_measure(workers, blocks) for workers, blocks in shapes]


def _measure(num_workers: int, num_blocks: int) -> dict[str, Any]:
    random, converter = Random(1), Converter()
    shared = [random.getrandbits(64) for _ in range(NUM_SHARED)]
    prompt = shared + [random.getrandbits(64) for _ in range(PROMPT_BLOCKS - NUM_SHARED)]
    gc.collect()
    tracemalloc.start()
    mirror = EventMirror()
    for worker in range(num_workers):
        mirror.add(str(worker), can_ask=False)
        own = prompt if worker == num_workers // 2 else shared
        names = own + [random.getrandbits(64) for _ in range(num_blocks - len(own))]
        for number, first in enumerate(range(0, num_blocks, 100)):
            part = names[first : first + 100]
            event = BlockStored(
                block_hashes=part, parent_block_hash=None, token_ids=[1] * len(part), block_size=1, medium="GPU"
            )
            payload = converter.codec.encode(EventBatch(0.0, [event], 0))
            mirror.receive(str(worker), number, payload)
        del names
    gc.collect()
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    times = []
    for _ in range(NUM_LOOKUPS):
        began = time.thread_time()
        found = mirror.overlaps(prompt)
        times.append(time.thread_time() - began)
    if max(found.values()) != min(PROMPT_BLOCKS, num_blocks):
        raise AssertionError(f"expected one worker with the whole prompt, got {found}")
    return {
        "num_workers": num_workers,
        "blocks_each": num_blocks,
        "mirror_mb": round(num_bytes / 1e6, 2),
        "bytes_per_block": round(num_bytes / (num_workers * num_blocks), 1),
        "lookup_us": round(1e6 * statistics.median(times), 1),
        "lookup_max_us": round(1e6 * max(times), 1),
    }
