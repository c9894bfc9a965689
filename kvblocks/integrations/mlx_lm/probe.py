"""Checks that this mlx-lm has what the integration needs, before anything of it is replaced.

mlx-lm doesn't promise any interface that is used here: the calls of its prompt cache, the states of its cache objects,
and where its server makes the prompt cache. Errors name whatever differs. The version only decides whether there is a
warning.
"""

import inspect
import re
from typing import Any

from kvblocks.integrations import probing

NAME = "kvblocks.integrations.mlx_lm"
TESTED_VERSIONS = ("0.32.2",)

_CALLS = {
    "fetch_nearest_cache": "model tokens",
    "insert_cache": "model tokens prompt_cache cache_type",
    "trim_to": "n_sequences n_bytes",
    "stats_by_type": "",
}
# What to make each class with, and how many parts its `state` has.
_STATES: dict[str, tuple[tuple[int, ...], int]] = {
    "KVCache": ((), 3),
    "ConcatenateKVCache": ((), 2),
    "QuantizedKVCache": ((), 5),
    "RotatingKVCache": ((8,), 6),
    "ChunkedKVCache": ((8,), 5),
    "ArraysCache": ((2,), 3),
}


def check_mlx_lm() -> None:
    """Raise UnsupportedEngineError if a needed part is missing. Warn of a version that wasn't tested."""
    version = "none"
    try:
        import mlx_lm
        from mlx_lm.models import cache

        version = str(mlx_lm.__version__)
        wrong = _differing(cache)
    except (AttributeError, ImportError) as error:
        wrong = [str(error)]
    expected = f"an mlx-lm with the parts that it uses (tested: {', '.join(TESTED_VERSIONS)})"
    probing.check_parts(NAME, expected, f"{version}, in which differ:", wrong)
    if version not in TESTED_VERSIONS:
        probing.warn_untested(NAME, TESTED_VERSIONS, version, "all parts that it uses are there")


def check_server(server: Any) -> None:
    """Raise UnsupportedEngineError unless mlx-lm's server makes and uses its prompt cache as expected."""
    made = inspect.getsource(server.run)
    wrong = [] if "LRUPromptCache(model_provider.cli_args.prompt_cache_size)" in made else ["run"]
    used = inspect.getsource(server.ResponseGenerator)
    known = {"fetch_nearest_cache", "insert_cache", "trim_to", "stats_by_type", "nbytes"}
    calls = set(re.findall(r"self\.prompt_cache\.(\w+)", used))
    wrong += [f"ResponseGenerator uses prompt_cache.{name}" for name in sorted(calls - known)]
    probing.check_parts(NAME, "the server of a tested mlx-lm", "one in which differ:", wrong)


def _differing(cache: Any) -> list[str]:
    owner = getattr(cache, "LRUPromptCache", None)
    if owner is None:
        return ["LRUPromptCache is gone"]
    # Ours has these calls too, if it was put in its place before.
    wrong = probing.differing_calls(owner, _CALLS)
    for name, (arguments, number) in _STATES.items():
        kind = getattr(cache, name, None)
        if kind is None or not hasattr(kind, "from_state"):
            wrong.append(f"{name} is gone, or has no from_state")
        elif len(kind(*arguments).state) != number:
            wrong.append(f"expected a state of {number} parts of {name}, got {len(kind(*arguments).state)}")
    return wrong
