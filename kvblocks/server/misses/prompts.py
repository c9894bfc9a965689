"""Keeps the last prompts for a while, so that a prompt can be compared with the previous one in its conversation.

A prompt is compared only with prompts of the same tenant and salt, so nobody learns of another's prompt, whatever ids,
keys or texts they guess. Everything is kept in memory, within bounds, and `forget` removes it.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvblocks.server.kept import BoundedStore

MAX_KEPT = 1000
"""The most prompts to keep."""

MAX_BYTES = 24 * 2**20
"""The most bytes of kept prompts, with their messages and answers."""

MAX_COMPARED = 64
"""How many of the last prompts are searched for the previous one of a conversation."""


class KeptMessage(NamedTuple):
    """A message. calls: the JSON of its tool calls and other fields; "" if it has none."""

    role: str
    text: str
    calls: str = ""


class KeptTool(NamedTuple):
    """The definition of a tool: its name, and a digest of the whole definition."""

    name: str
    digest: bytes


@dataclass(slots=True, eq=False)
class KeptPrompt:
    """A prompt as it came. Equality is identity.

    key: the id of its answer. tenant, salt: whose it is. session: its `prompt_cache_key`. tokens: the prompt's tokens;
    output: those of its first answer, once that is done. messages, tools: those of a chat; empty for other prompts.
    """

    key: str
    tenant: str | None
    salt: str | None
    session: object
    tokens: "array[int]"
    messages: tuple[KeptMessage, ...] = ()
    tools: tuple[KeptTool, ...] = ()
    output: "array[int]" = field(default_factory=lambda: array("I"))

    def num_common(self, other: "KeptPrompt") -> int:
        """How many leading tokens this prompt has in common with another one and its answer. O(tokens)."""
        common = _num_equal(self.tokens, other.tokens)
        if common < len(other.tokens) or common == len(self.tokens):
            return common
        return common + _num_equal(self.tokens[common:], other.output)


class KeptPrompts:
    """The kept prompts, the oldest first. Owned by the engine's thread."""

    def __init__(self) -> None:
        self._kept: BoundedStore[KeptPrompt] = BoundedStore(MAX_KEPT, MAX_BYTES)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, prompt: KeptPrompt) -> None:
        """Keep a prompt, and drop the oldest ones that exceed the bounds. O(its messages)."""
        self._kept.keep(prompt.key, prompt)

    def finish(self, key: str, output: list[int]) -> None:
        """Note the answer to a prompt. Does nothing if the prompt isn't kept any more."""
        prompt = self._kept.get(key)
        if prompt is not None:
            prompt.output = array("I", output)
            self._kept.keep(key, prompt)

    def forget(self, salt: str | None) -> None:
        """Drop all prompts of a salt. O(prompts)."""
        self._kept.forget(lambda one: one.salt == salt)

    def get(self, key: str) -> KeptPrompt | None:
        """Return a prompt by the id of its answer, whosever it is; None if it isn't kept."""
        return self._kept.get(key)

    def find(self, key: str, tenant: str | None, salt: str | None) -> KeptPrompt | None:
        """Return a prompt by the id of its answer; None if it isn't kept, or has another tenant or salt."""
        prompt = self._kept.get(key)
        return prompt if prompt is not None and (prompt.tenant, prompt.salt) == (tenant, salt) else None

    def last(self, tenant: str | None, salt: str | None, session: object = None) -> KeptPrompt | None:
        """Return the last prompt of a tenant and salt, and of a session if one is given. O(prompts)."""
        found = (one for one in self._kept.newest_first() if (one.tenant, one.salt) == (tenant, salt))
        return next((one for one in found if session is None or one.session == session), None)

    def before(self, prompt: KeptPrompt) -> KeptPrompt | None:
        """Return the previous prompt of this one's conversation; None if none is known.

        With a session, that is the session's last prompt. Otherwise it is the prompt with the most leading messages in
        common, not counting the system text, and among those the one with the most leading tokens. O(MAX_COMPARED
        prompts).
        """
        others = [one for one in self._older(prompt) if (one.tenant, one.salt) == (prompt.tenant, prompt.salt)]
        if prompt.session is not None:
            return next((one for one in others if one.session == prompt.session), None)
        best, most = None, (0, 0)
        for one in others[:MAX_COMPARED]:
            likeness = (_num_common_messages(one, prompt), prompt.num_common(one))
            if likeness > most and (likeness[0] or likeness[1] * 2 > min(len(prompt.tokens), len(one.tokens))):
                best, most = one, likeness
        return best

    def _older(self, prompt: KeptPrompt) -> Iterator[KeptPrompt]:
        is_older = False
        for one in self._kept.newest_first():
            if is_older:
                yield one
            is_older = is_older or one is prompt


def _num_common_messages(one: KeptPrompt, other: KeptPrompt) -> int:
    """How many first messages are equal, without system texts."""
    turns = [[message for message in prompt.messages if message.role != "system"] for prompt in (one, other)]
    return next((at for at, (a, b) in enumerate(zip(*turns, strict=False)) if a != b), min(map(len, turns)))


def _num_equal(one: "array[int]", other: "array[int]") -> int:
    """How many first tokens are equal."""
    end = min(len(one), len(other))
    differ = np.asarray(one)[:end] != np.asarray(other)[:end]
    return int(differ.argmax()) if differ.any() else end
