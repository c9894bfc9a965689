"""A plug-in of vLLM's: has a configuration that names our schedulers checked before vLLM loads the model.

vLLM calls `register` in each of its processes, wherever kvblocks is installed (the entry point group
`vllm.general_plugins`). With another scheduler nothing changes, and nothing of the integration is imported.

If the environment variable KVBLOCKS_AUTO names vllm, a configuration without a scheduler gets ours, with the option
`kvblocks_fallback`: where something is unsupported, vLLM's own manager stays.
"""

import sys
import warnings
from functools import wraps
from typing import Any

from kvblocks.integrations import auto

PACKAGE = "kvblocks.integrations.vllm"


def register() -> None:
    """Have `EngineArgs.create_engine_config` check what it makes. It does so once, however often this is called.

    Who has not imported EngineArgs, such as a process that looks at a model's class, makes no configuration.
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
    """Whether a `scheduler_cls`, a class or a dotted name, is one of ours, or a class below one."""
    if isinstance(scheduler, type):
        return any(parent.__module__.startswith(PACKAGE + ".") for parent in scheduler.__mro__)
    return isinstance(scheduler, str) and scheduler.startswith(PACKAGE + ".")


def choose(config: Any) -> None:
    """Have a VllmConfig without a scheduler use ours, and vLLM's own manager where something is unsupported."""
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
