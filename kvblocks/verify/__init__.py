"""Verifies any block manager in Python by a random walk over simulated KV memory.

    from kvblocks import verify
    from kvblocks.verify.adapters.own import ManagerAdapter

    print(verify.run(ManagerAdapter, steps=100_000, seed=1))

The walk starts requests that share prefixes, lets them grow and end, and lets steps fail, in a pool so small that
blocks are evicted all the time. A simulated memory follows: each slot holds the whole context that its KV was computed
in. After every call each request must find its own KV in its own slots. So the walk finds hits on the wrong KV or on KV
that was never written, blocks with two owners, lost blocks, and, in a pool with room for everything, missed hits. It
knows nothing about hashes, trees or queues.

To verify another manager, write a `CacheAdapter` for it: four methods, and a few with defaults. A fault is raised as a
`VerificationError`, with the shortest list of calls found that still shows it. Tests that drive a whole scheduler
themselves may use `SlotMemory` alone.

`kvblocks.verify.adapters` has adapters for other engines, and `docs/verify.md` what was found in them.
"""

from kvblocks.verify.adapter import CacheAdapter, WalkRequest
from kvblocks.verify.contexts import Contexts
from kvblocks.verify.errors import VerificationError
from kvblocks.verify.memory import SlotMemory
from kvblocks.verify.report import Report
from kvblocks.verify.run import run

__all__ = ["CacheAdapter", "Contexts", "Report", "SlotMemory", "VerificationError", "WalkRequest", "run"]
