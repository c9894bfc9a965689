"""What a body of another protocol than Chat Completions says beside its chat."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Origin:
    """What a body of another protocol says beside its chat.

    echo: fields that the answer repeats. chat: the turns, without instructions. is_stored: whether to keep the answer.
    """

    echo: Mapping[str, Any]
    chat: tuple[Mapping[str, Any], ...]
    is_stored: bool
