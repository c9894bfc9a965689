"""Shared by the probes of all integrations: comparing an engine's parts, and the errors that refuse an engine."""

import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from kvblocks import UnsupportedEngineError


def refuse(integration: str, feature: str, reason: str) -> UnsupportedEngineError:
    """Return the error for a feature that an integration doesn't support."""
    return UnsupportedEngineError(f"{integration}: expected what it serves, got {feature}: {reason}")


def check_parts(integration: str, expected: str, got: str, parts: Iterable[str]) -> None:
    """Raise UnsupportedEngineError if there are differing parts. expected, got: descriptions of the engine."""
    named = "; ".join(parts)
    if named:
        raise UnsupportedEngineError(f"{integration}: expected {expected}, got {got} {named}")


def warn_untested(integration: str, tested: Iterable[str], got: str, found: str) -> None:
    """Warn the caller's caller that its engine's version, `got`, hasn't been tested."""
    warnings.warn(f"{integration} was tested with {', '.join(tested)}, not with {got}; {found}", stacklevel=4)


def differing_calls(owner: Any, calls: Mapping[str, str | tuple[str, ...]]) -> list[str]:
    """Return the differences in a class's calls: missing calls, and calls with other parameters.

    calls: for each call's name, its parameters' names separated by spaces, or a tuple of such lists that are all right.
    """
    problems = []
    for name, wanted in calls.items():
        full_name = f"{owner.__name__}.{name}"
        call = getattr(owner, name, None)
        if not callable(call):
            problems.append(f"{full_name} is gone")
            continue
        parameters = " ".join(inspect.signature(call).parameters).removeprefix("self").strip()
        choices = (wanted,) if isinstance(wanted, str) else wanted
        if parameters not in choices:
            *expected, got = (", ".join(names.split()) for names in (*choices, parameters))
            problems.append(f"expected {full_name}({') or ('.join(expected)}), got ({got})")
    return problems
