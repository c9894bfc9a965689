"""Verifies the prefix cache of a running server: `kvblocks verify http://HOST:PORT`, by requests like any client's.

A cache must not change an answer. So each case sends the same prompt in several states of the cache, and compares the
tokens and their log probabilities with those of a cold cache. How much they differ without any fault is measured first.
Prompts are lists of words that begin to repeat, since even small models continue such a list by looking up its words in
the context. An answer then depends on the KV of one known place.

`docs/verify.md` says what each case shows, and what it can't.
"""

from kvblocks.verify.server.checkup import Checkup, CheckupOptions
from kvblocks.verify.server.finding import Finding
from kvblocks.verify.server.target import AnswerError, Target, TargetError, TimeUpError

__all__ = ["AnswerError", "Checkup", "CheckupOptions", "Finding", "Target", "TargetError", "TimeUpError"]
