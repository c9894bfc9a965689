"""A vLLM plug-in that checks configurations with kvblocks' schedulers before vLLM loads the model.

vLLM calls `register` in each of its processes, wherever kvblocks is installed (the entry point group
`vllm.general_plugins`). With another scheduler nothing changes, and nothing of the integration is imported.

If the environment variable KVBLOCKS_AUTO names vllm, a configuration without a scheduler gets ours, with the option
`kvblocks_fallback`: if something is unsupported, vLLM's own manager is used.
"""

import sys
import warnings
from functools import wraps
from typing import Any

from kvblocks.integrations import auto

PACKAGE = "kvblocks.integrations.vllm"


def register() -> None:
    """Make `EngineArgs.create_engine_config` check its results. Further calls change nothing.

    A process that hasn't imported EngineArgs, such as one that inspects a model's class, makes no configuration.
    """
    arguments: Any = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    make = getattr(arguments, "create_engine_config", None)
    if make is None or getattr(make, "checked_by", None) == PACKAGE:
        return

    @wraps(make)
    def make_and_check(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = make(self, *args, **kwargs)
        if "vllm" in auto.wanted() and config.scheduler_config.scheduler_cls is None:
            choose(config)
        if names_ours(config.scheduler_config.scheduler_cls):
            check(config)
        return config

    make_and_check.checked_by = PACKAGE  # type: ignore[attr-defined]
    arguments.create_engine_config = make_and_check


def names_ours(scheduler: Any) -> bool:
    """Whether a `scheduler_cls` (a class or a dotted name) is one of our schedulers, or a subclass."""
    if isinstance(scheduler, type):
        return any(parent.__module__.startswith(PACKAGE + ".") for parent in scheduler.__mro__)
    return isinstance(scheduler, str) and scheduler.startswith(PACKAGE + ".")


def choose(config: Any) -> None:
    """Make a VllmConfig without a scheduler use ours, or vLLM's own manager if something is unsupported."""
    options = config.additional_config
    if not isinstance(options, dict):
        got = type(options).__name__
        warnings.warn(
            f"{auto.VARIABLE}: vllm was not installed: expected a dict as additional_config, got {got}", stacklevel=2
        )
        return
    config.additional_config = {"kvblocks_fallback": True, **options}
    kind = "KVBlocksAsyncScheduler" if config.scheduler_config.async_scheduling else "KVBlocksScheduler"
    config.scheduler_config.scheduler_cls = f"{PACKAGE}.{kind}"


def check(config: Any) -> None:
    """Raise UnsupportedEngineError if a VllmConfig, or this vLLM, is unsupported, unless it asks for vLLM's manager."""
    from kvblocks.integrations.vllm.early import check_engine_config
    from kvblocks.integrations.vllm.probe import falls_back

    if not falls_back(config):
        check_engine_config(config)
