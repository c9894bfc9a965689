"""What a body of a protocol other than Chat Completions contains in addition to its chat."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Origin:
    """What a body of another protocol contains in addition to its chat.

    echo: the fields that the answer repeats. chat: the turns, without instructions. is_stored: whether to store the
    answer.
    """

    echo: Mapping[str, Any]
    chat: tuple[Mapping[str, Any], ...]
    is_stored: bool
