"""The items of the comparison, in order, and the targets that kvblocks sets itself against vLLM."""

from dataclasses import dataclass

from bench.core.workload import NUM_REQUESTS, STEP_SEQUENCES


@dataclass(frozen=True, slots=True)
class Item:
    """One row of work: the driver's method `kind` with `size`, and how its result reads."""

    kind: str
    size: int
    title: str
    unit: str
    ns_per_unit: int = 1

    @property
    def name(self) -> str:
        """A name without blanks, for the results' file."""
        return f"{self.kind}_{self.size}"


@dataclass(frozen=True, slots=True)
class Target:
    """How many times vLLM's speed an item should reach, by build."""

    name: str
    plain: float
    compiled: float


BASELINE = "vllm"
MEMORY_TARGET = 0.75
"""The target for the bytes per block with everything cached, as a share of vLLM's."""

_PER_BLOCK = [
    Item(kind, size, f"{title}, N={size}", "ns/block")
    for kind, title in (("allocate", "allocate"), ("free", "free"), ("evict", "allocate with eviction"))
    for size in (1, 16, 64, 1024)
]
_HITS = [
    Item(kind, size, f"{title}, {size // 1024}k tokens", "us/call", 1000)
    for kind, title in (("hit_buffer", "full hit from a buffer"), ("hit_list", "full hit from a list"))
    for size in (1024, 32_768, 131_072)
]
ITEMS = [
    *_PER_BLOCK,
    Item("touch", 64, "touch free blocks, N=64", "ns/block"),
    Item("touch", 2048, "touch free blocks, N=2048", "ns/block"),
    Item("chain_hash", 32_768, "chain hash, 32k tokens", "ns/block"),
    *_HITS,
    Item("half_hit", 1024, "half the prompt hit, 1k tokens", "us/call", 1000),
    Item("half_hit", 32_768, "half the prompt hit, 32k tokens", "us/call", 1000),
    Item("append", NUM_REQUESTS, "decode append, one call a token", "ns/token"),
    Item("step", STEP_SEQUENCES, f"decode step of {STEP_SEQUENCES} sequences", "ns/token"),
    Item("lifecycle", 1, "request life cycle, one at a time", "us/request", 1000),
    Item("lifecycle", NUM_REQUESTS, f"request life cycle, {NUM_REQUESTS} in lock step", "us/request", 1000),
]
TARGETS = [
    Target("allocate_16", 4, 8),
    Target("allocate_1024", 4, 8),
    Target("free_16", 2, 8),
    Target("free_1024", 2, 8),
    Target("evict_16", 2, 4),
    Target("evict_1024", 3, 8),
    Target("hit_buffer_1024", 100, 100),
    Target("hit_buffer_32768", 400, 400),
    Target("hit_list_1024", 6, 6),
    Target("hit_list_32768", 8, 8),
    Target(f"append_{NUM_REQUESTS}", 15, 25),
    Target(f"step_{STEP_SEQUENCES}", 25, 40),
    Target(f"lifecycle_{NUM_REQUESTS}", 12, 20),
]
