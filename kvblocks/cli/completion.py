"""What a shell completes after options that take a name: `kvblocks --install-completion`.

The names are read from where the option is checked. Each module is imported when it is needed, and none needs torch.
"""

from collections.abc import Iterable


def models(incomplete: str) -> list[str]:
    """The models that kvblocks knows. Folders are completed by the shell itself."""
    from kvblocks.engine.model.fetch import KNOWN_MODELS

    return _beginning(incomplete, KNOWN_MODELS)


def evictions(incomplete: str) -> list[str]:
    """The eviction policies."""
    from kvblocks.retention.policies import NAMED

    return _beginning(incomplete, NAMED)


def schedules(incomplete: str) -> list[str]:
    """The orders of admission."""
    from kvblocks.engine.schedules import SCHEDULES

    return _beginning(incomplete, SCHEDULES)


def attentions(incomplete: str) -> list[str]:
    """The kinds of attention."""
    from kvblocks.engine.attention.names import ATTENTIONS

    return _beginning(incomplete, ATTENTIONS)


def kv_cache_dtypes(incomplete: str) -> list[str]:
    """The dtypes of the KV cache."""
    from kvblocks.engine.attention.names import KV_CACHE_DTYPES

    return _beginning(incomplete, KV_CACHE_DTYPES)


def log_levels(incomplete: str) -> list[str]:
    """The levels of the log."""
    from kvblocks.server.settings import LOG_LEVELS

    return _beginning(incomplete, LOG_LEVELS)


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
