"""The eighteen configurations that decisions are compared in, those with windows, and one in which vLLM has a fault."""

from dataclasses import dataclass, field, replace

from bench.vllm.schedulers import LOOKS_AHEAD, Settings
from integrations.vllm.workload import Mix

SMALL = 81  # 80 blocks, and vLLM's null block
SMALL_MIX = Mix(longest=400, most_output=100)


@dataclass(frozen=True, slots=True)
class Configuration:
    """A scheduler's settings, and the requests that it gets."""

    name: str
    settings: Settings
    mix: Mix = field(default_factory=Mix)


def small(name: str, settings: Settings, mix: Mix = SMALL_MIX) -> Configuration:
    """Return a configuration whose pool is too small for its requests."""
    return Configuration(f"{settings.num_blocks - 1} blocks, {name}", settings, mix)


CONFIGURATIONS = [
    Configuration("plain", Settings()),
    Configuration("chunked", Settings(max_num_batched_tokens=128, long_prefill_token_threshold=70)),
    Configuration("cancel and salts", Settings(), Mix(num_salts=3, share_cancelled=0.3)),
    Configuration("speculation", Settings(num_drafts=3)),
    Configuration("async", Settings(is_async=True)),
    Configuration("speculation and async", Settings(num_drafts=3, is_async=True)),
    Configuration("no caching", Settings(has_caching=False)),
    Configuration("block size 4", Settings(block_size=4)),
    Configuration("runner 1", Settings(num_blocks=161, is_async=True, runner=1)),
    Configuration("runner 2", Settings(num_blocks=161, is_async=True, runner=2)),
    Configuration("priority", Settings(policy="priority"), Mix(num_priorities=4)),
    small("watermark", Settings(num_blocks=SMALL, watermark=0.1)),
    small("no full prompt reserved", Settings(num_blocks=SMALL, reserves_full_prompt=False)),
    small("priority", Settings(num_blocks=SMALL, policy="priority"), Mix(400, 100, num_priorities=4)),
    small("speculation", Settings(num_blocks=SMALL, num_drafts=3)),
    small("async", Settings(num_blocks=SMALL, is_async=True)),
    small("speculation and async", Settings(num_blocks=SMALL, num_drafts=3, is_async=True)),
    small("no caching", Settings(num_blocks=SMALL, has_caching=False)),
]

# Beside the eighteen: MLA and its sparse indexer, which share a block table.
LATENT = [
    Configuration("latent", Settings(is_latent=True)),
    small("latent, async", Settings(num_blocks=SMALL, is_latent=True, is_async=True)),
]

# Drafts of a model, which writes keys and values behind the known tokens.
EAGLE = [
    Configuration("eagle", Settings(num_drafts=3, is_eagle=True)),
    Configuration("eagle, async", Settings(num_drafts=3, is_eagle=True, is_async=True)),
]
# In these copies of prefixes are evicted, which vLLM keeps longer than kvblocks.
EAGLE_SMALL = [
    small("eagle", Settings(num_blocks=SMALL, num_drafts=3, is_eagle=True)),
    small("eagle, async", Settings(num_blocks=SMALL, num_drafts=3, is_eagle=True, is_async=True)),
]
if LOOKS_AHEAD:  # what an older vLLM always does
    EAGLE, EAGLE_SMALL = (
        [*given, *(replace(c, name=f"{c.name}, drop", settings=replace(c.settings, drops_block=True)) for c in given)]
        for given in (EAGLE, EAGLE_SMALL)
    )

# And the one in which vLLM has a fault.
PRIORITY_CHUNKED = small(
    "priority and chunks",
    Settings(
        num_blocks=SMALL,
        policy="priority",
        max_num_batched_tokens=96,
        long_prefill_token_threshold=40,
        reserves_full_prompt=False,
    ),
    Mix(400, 100, num_priorities=4),
)

# Two windows, one of them no multiple of the block size. A group takes blocks of the same pool.
_WINDOWS = {
    "windows": Settings(num_blocks=20_000, windows=(64, 200)),
    "windows, chunked": Settings(num_blocks=20_000, windows=(64, 200), max_num_batched_tokens=128),
    "windows, async": Settings(num_blocks=20_000, windows=(64, 200), is_async=True),
    "windows, speculation": Settings(num_blocks=20_000, windows=(64,), num_drafts=3),
    "windows, both": Settings(num_blocks=20_000, windows=(64,), num_drafts=3, is_async=True),
}
_WINDOWS_SMALL = {
    "windows": Settings(num_blocks=161, windows=(64,)),
    "windows, async": Settings(num_blocks=161, windows=(64,), is_async=True),
}
CHUNKS = [
    Configuration("chunks", Settings(num_blocks=20_000, chunks=(128,))),
    Configuration("chunks, chunked", Settings(num_blocks=20_000, chunks=(128, 48), max_num_batched_tokens=128)),
    Configuration("chunks, async", Settings(num_blocks=20_000, chunks=(64,), is_async=True)),
    Configuration("chunks, speculation", Settings(num_blocks=20_000, chunks=(64,), num_drafts=3)),
]
CHUNKS_SMALL = [
    small("chunks", Settings(num_blocks=161, chunks=(64,))),
    small("chunks, async", Settings(num_blocks=161, chunks=(64,), is_async=True)),
    small("chunks, speculation", Settings(num_blocks=161, chunks=(48,), num_drafts=3)),
    small("chunks, both", Settings(num_blocks=161, chunks=(64,), num_drafts=3, is_async=True)),
]

# vLLM's default: of a window's blocks it caches only those that it expects to be hit.
WINDOWS = [Configuration(name, settings) for name, settings in _WINDOWS.items()]
WINDOWS_SMALL = [small(name, settings) for name, settings in _WINDOWS_SMALL.items()]
# It caches all of them, as kvblocks does.
KEPT_WINDOWS, KEPT_WINDOWS_SMALL = (
    [replace(c, name=f"{c.name}, kept", settings=replace(c.settings, keeps_windows=True)) for c in configurations]
    for configurations in (WINDOWS, WINDOWS_SMALL)
)

# Recurrent layers beside full attention: a request's state is one block, and nothing is cached.
STATES = [
    Configuration("states", Settings(num_states=1, has_caching=False)),
    Configuration("states, async", Settings(num_states=1, has_caching=False, is_async=True)),
    Configuration("states, chunked", Settings(num_states=1, has_caching=False, max_num_batched_tokens=128)),
    small("states", Settings(num_blocks=SMALL, num_states=1, has_caching=False)),
    small("states, async", Settings(num_blocks=SMALL, num_states=1, has_caching=False, is_async=True)),
]
# With caching, states stay in blocks where chunks ended. kvblocks caches all of them, vLLM by default few.
_CACHED_STATES = {
    "cached states": Settings(num_blocks=20_000, num_states=1),
    "three groups": Settings(num_blocks=20_000, num_states=3, max_num_batched_tokens=128),
    "async": Settings(num_blocks=20_000, num_states=1, is_async=True),
    "beside windows": Settings(num_blocks=20_000, num_states=1, windows=(64,)),
    "saved within chunks": Settings(num_blocks=20_000, num_states=1, saves_within=True),
}
CACHED_STATES = [Configuration(name, settings) for name, settings in _CACHED_STATES.items()]
KEPT_STATES = [
    replace(c, name=f"{c.name}, kept", settings=replace(c.settings, keeps_windows=True)) for c in CACHED_STATES
]
CACHED_STATES_SMALL = [
    small("cached states", Settings(num_blocks=161, num_states=1)),
    small("cached states, async", Settings(num_blocks=161, num_states=1, is_async=True)),
]

# Ring buffers beside full attention: a request has one block for them, and hits need none.
RINGS = [
    Configuration("ring", Settings(has_ring=True)),
    Configuration("ring, async", Settings(has_ring=True, is_async=True)),
    Configuration("ring, speculation", Settings(has_ring=True, num_drafts=3)),
    small("ring", Settings(num_blocks=SMALL, has_ring=True)),
    small("ring, async", Settings(num_blocks=SMALL, has_ring=True, is_async=True)),
]
