"""Eviction policies in the box, by the names under which managers and caches take them.

They are written as a user's would be: against `policy` alone, without anything of the core. So is a new one, which gets
its name here.
"""

from kvblocks.retention.policies.lru import LRU
from kvblocks.retention.policies.policy import PolicyFactory
from kvblocks.retention.policies.s3fifo import S3FIFO
from kvblocks.retention.policies.sessions import Sessions
from kvblocks.retention.policies.slru import SLRU

NAMED: dict[str, PolicyFactory] = {"lru": LRU, "slru": SLRU, "s3fifo": S3FIFO, "sessions": Sessions}
