"""Options that are fields of settings: `takes_settings` for a command that takes all of them, `option_of` for one."""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Annotated, Any

import typer

from kvblocks.cli import completion
from kvblocks.server.flags import Option, options_of, values_of


def option_of(settings: type, field: str, **more: Any) -> Any:
    """Return typer's description of a field's option. more: of `typer.Option`."""
    return next(_described(option, **more) for option in options_of(settings) if option.field == field)


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command options for the fields of its parameters that are settings, and pass it the settings.

    Such a parameter is annotated with a dataclass whose fields are made by `kvblocks.server.flags.flag`.
    """
    own = inspect.signature(command).parameters.values()
    settings: dict[str, type] = {one.name: one.annotation for one in own if _is_settings(one.annotation)}
    parameters: list[inspect.Parameter] = []
    for one in own:
        if one.name not in settings:
            parameters.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        for option in options_of(settings[one.name]):
            kind = option.kind if option.default is not None else option.kind | None
            parameters.append(
                inspect.Parameter(
                    option.field,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=option.default,
                    annotation=Annotated[kind, _described(option)],
                )
            )

    def run(**given: Any) -> None:
        made = {name: kind(**values_of(kind, given)) for name, kind in settings.items()}
        command(**made, **{one.name: given[one.name] for one in own if one.name not in settings})

    run.__doc__, run.__name__ = command.__doc__, command.__name__
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


def _is_settings(annotation: Any) -> bool:
    return is_dataclass(annotation)


def _described(option: Option, **more: Any) -> Any:
    """What typer needs to know. A function of `completion` called like the field plus "s" completes the value."""
    flag, names = option.flag, getattr(completion, f"{option.field}s", None)
    return typer.Option(
        option.name, help=flag.help, rich_help_panel=flag.panel, envvar=flag.envvar, autocompletion=names, **more
    )
