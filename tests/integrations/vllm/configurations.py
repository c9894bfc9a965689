"""The eighteen configurations that decisions are compared in, those with windows, and one in which vLLM has a fault."""

from dataclasses import dataclass, field

from bench.vllm.schedulers import Settings
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

# Beside the eighteen: drafts of a model, which writes keys and values behind the known tokens.
EAGLE = [
    Configuration("eagle", Settings(num_drafts=3, is_eagle=True)),
    Configuration("eagle, async", Settings(num_drafts=3, is_eagle=True, is_async=True)),
    small("eagle", Settings(num_blocks=SMALL, num_drafts=3, is_eagle=True)),
    small("eagle, async", Settings(num_blocks=SMALL, num_drafts=3, is_eagle=True, is_async=True)),
]

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
WINDOWS = [
    Configuration("windows", Settings(num_blocks=20_000, windows=(64, 200))),
    Configuration("windows, chunked", Settings(num_blocks=20_000, windows=(64, 200), max_num_batched_tokens=128)),
    Configuration("windows, async", Settings(num_blocks=20_000, windows=(64, 200), is_async=True)),
    Configuration("windows, speculation", Settings(num_blocks=20_000, windows=(64,), num_drafts=3)),
    Configuration("windows, both", Settings(num_blocks=20_000, windows=(64,), num_drafts=3, is_async=True)),
]
WINDOWS_SMALL = [
    small("windows", Settings(num_blocks=161, windows=(64,))),
    small("windows, async", Settings(num_blocks=161, windows=(64,), is_async=True)),
]
