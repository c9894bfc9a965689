"""Is the prefix cache of a running server right? `kvblocks verify http://HOST:PORT` asks it, as any client would.

A cache must not change an answer. So each case asks for the same prompt in several states of the cache, and compares
the tokens and their log probabilities with those of a cold cache. How much they differ without any fault is measured
first. Prompts are lists of words that begin to repeat themselves, since even small models continue such a list by
looking its words up in the context: an answer then depends on the KV of one known place.

See `docs/verify.md`: what each case shows, and what it can't.
"""

from kvblocks.verify.server.checkup import Checkup, CheckupOptions
from kvblocks.verify.server.finding import Finding
from kvblocks.verify.server.target import Target, TargetError

__all__ = ["Checkup", "CheckupOptions", "Finding", "Target", "TargetError"]
