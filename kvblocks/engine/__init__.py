"""The reference engine: a complete example of how to run a real model on the block manager.

    engine = Engine("smollm2")
    completions = engine.generate(["The capital of France is"], max_tokens=8)

The names below are imported when they are first used, since they import torch. `engine.schedule` needs only the core.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvblocks.engine.completion import Completion, Piece
    from kvblocks.engine.engine import Engine
    from kvblocks.engine.errors import ModelError
    from kvblocks.engine.generation import Generation
    from kvblocks.engine.options import GenerationOptions
    from kvblocks.engine.run.runner import LoadedModel
    from kvblocks.engine.schedule.step import StepLimits
    from kvblocks.engine.tiers.options import TierOptions
    from kvblocks.engine.tiers.place import Move, Place, Site
    from kvblocks.engine.tiers.registry import register_place

__all__ = [
    "Completion",
    "Engine",
    "Generation",
    "GenerationOptions",
    "LoadedModel",
    "ModelError",
    "Move",
    "Piece",
    "Place",
    "Site",
    "StepLimits",
    "TierOptions",
    "register_place",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvblocks.engine import completion, engine, errors, generation, options
        from kvblocks.engine.run import runner
        from kvblocks.engine.schedule import step
        from kvblocks.engine.tiers import options as tier_options
        from kvblocks.engine.tiers import place, registry
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "kvblocks":
            raise  # a module of our own is missing: a bug
        from kvblocks.arguments import pip_install

        message = f"kvblocks.engine: expected the package {error.name}, got none: {pip_install('engine')}"
        raise ModuleNotFoundError(message, name=error.name) from error

    for module in (completion, engine, errors, generation, options, runner, step, tier_options, place, registry):
        if name in vars(module):
            return vars(module)[name]
    raise AssertionError(f"{name}: in __all__, but in none of the modules")
