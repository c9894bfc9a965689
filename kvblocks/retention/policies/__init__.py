"""The built-in eviction policies, by the names under which managers and caches take them.

They are written as a user would write them: they import nothing of kvblocks outside this folder, and `policy` is the
whole interface. A new policy is written in the same way and gets its name here. `check_policy` checks any policy.
"""

from kvblocks.retention.policies.check import check_policy as check_policy
from kvblocks.retention.policies.lru import LRU
from kvblocks.retention.policies.policy import PolicyFactory
from kvblocks.retention.policies.s3fifo import S3FIFO
from kvblocks.retention.policies.sessions import SessionsPolicy
from kvblocks.retention.policies.slru import SLRU

NAMED: dict[str, PolicyFactory] = {"lru": LRU, "slru": SLRU, "s3fifo": S3FIFO, "sessions": SessionsPolicy}
