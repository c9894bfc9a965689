"""How times grow: pools of 10k to 1M blocks, few and many cached prefixes, prompts of 1k to 128k tokens.

No time in the manager should grow with the pool's size or with the number of prefixes. A hit should cost a memcmp of
its prompt. Times that still grow with the pool are due to the processor: a million blocks don't fit its caches.
"""

from bench.core.micro import make_cases, match_case, to_row
from bench.core.workload import BLOCK_SIZE
from bench.timing import measure
from kvblocks import KVCacheManager

POOLS = (10_000, 100_000, 1_000_000)
PREFIX_BLOCKS = (64, 1)
PROMPTS = (1024, 4096, 16_384, 32_768, 65_536, 131_072)
Rows = list[dict[str, object]]


def measure_pools(num_rounds: int, num_samples: int) -> Rows:
    """Return the items of `bench.core.micro` for each size of pool, and for prefixes of 64 blocks and of one."""
    shapes = [(num_blocks, PREFIX_BLOCKS[0]) for num_blocks in POOLS] + [(POOLS[1], PREFIX_BLOCKS[1])]
    made = {shape: make_cases(*shape) for shape in shapes}
    rows = []
    for name in made[shapes[0]]:
        spreads = measure({str(shape): made[shape][name][0] for shape in shapes}, num_rounds, num_samples)
        for shape in shapes:
            row = to_row(name, spreads[str(shape)], *made[shape][name][1:])
            rows.append(row | {"pool_blocks": shape[0], "num_prefixes": shape[0] // shape[1]})
    return rows


def measure_prompts(num_rounds: int, num_samples: int) -> Rows:
    """Return the cost of a full hit for prompts of increasing length, given in a buffer."""
    manager = KVCacheManager(POOLS[1], BLOCK_SIZE)
    spreads = measure({str(size): match_case(manager, size) for size in PROMPTS}, num_rounds, num_samples)
    return [
        to_row(f"full hit of {size} tokens", spreads[str(size)], "us/call", 1000)
        | {"ns_per_block": round(spreads[str(size)].low / (size / BLOCK_SIZE), 2)}
        for size in PROMPTS
    ]


def run_growth(num_rounds: int, num_samples: int) -> dict[str, Rows]:
    """Measure and print both tables."""
    pools = measure_pools(num_rounds, num_samples)
    print(f"\n{'item':<32}{'pool':>10}{'prefixes':>10}  {'unit':<10}{'min':>10}{'median':>10}{'max':>10}")
    for row in pools:
        numbers = f"{row['min']:>10}{row['median']:>10}{row['max']:>10}"
        print(f"{row['item']:<32}{row['pool_blocks']:>10}{row['num_prefixes']:>10}  {row['unit']:<10}{numbers}")
    prompts = measure_prompts(num_rounds, num_samples)
    print(f"\n{'item':<32}{'unit':<10}{'min':>10}{'median':>10}{'max':>10}{'ns/block':>10}")
    for row in prompts:
        numbers = f"{row['min']:>10}{row['median']:>10}{row['max']:>10}{row['ns_per_block']:>10}"
        print(f"{row['item']:<32}{row['unit']:<10}{numbers}")
    return {"pools": pools, "prompts": prompts}
