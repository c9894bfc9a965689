"""The built-in eviction policies, by the names under which managers and caches take them.

They are written as a user would write them: they know nothing of the core, and `policy` is the whole interface. A new
policy is written in the same way and gets its name here. `check_policy` checks any policy.
"""

from typing import Any

from kvblocks.arguments import shown
from kvblocks.errors import InvalidArgumentError
from kvblocks.retention.policies.check import check_policy
from kvblocks.retention.policies.lru import LRU
from kvblocks.retention.policies.policy import MAX_SESSIONS, PolicyFactory
from kvblocks.retention.policies.s3fifo import S3FIFO
from kvblocks.retention.policies.sessions import SessionsPolicy
from kvblocks.retention.policies.slru import SLRU

__all__ = [
    "LRU",
    "MAX_SESSIONS",
    "NAMED",
    "S3FIFO",
    "SLRU",
    "PolicyFactory",
    "SessionsPolicy",
    "check_policy",
    "find_factory",
]

NAMED: dict[str, PolicyFactory] = {"lru": LRU, "slru": SLRU, "s3fifo": S3FIFO, "sessions": SessionsPolicy}


def find_factory(eviction: Any) -> PolicyFactory:
    """Return what makes policies: `eviction` itself, or `NAMED[eviction]` for a name. Raises InvalidArgumentError."""
    if callable(eviction):
        given: PolicyFactory = eviction
        return given
    if type(eviction) is str and eviction in NAMED:
        return NAMED[eviction]
    names = ", ".join(map(repr, NAMED))
    raise InvalidArgumentError(
        f"eviction: expected None, {names}, or what makes a policy, such as its class; got {shown(eviction)}"
    )
