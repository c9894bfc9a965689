"""Faults in the code of tiers, each of which `make test` must find: checks, holds and notes that are left out.

`python tests/tiers/faults.py [WORD ...]` makes each whose name has all the words, and says after how many seconds
which test found it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.faults import Change, find_all

TRANSFERS, POOL, JOBS, QUEUE = "tiers/transfers.py", "tiers/pool.py", "tiers/jobs.py", "tiers/store_queue.py"
RESTORING, CHANGES, HIT, PREFIX = "tiers/restoring.py", "tiers/changes.py", "tiers/hit.py", "tiers/prefix.py"

TESTS = tuple(
    f"tests/tiers/test_{name}.py"
    for name in (
        *("tiers", "grouped_tiers", "restoring", "grouped_restoring", "tier_quotas", "forgetting", "shared_tiers"),
        *("tier_events", "tier_removals", "tier_machine"),
    )
)
"""The quick ones first."""

FAULTS: dict[str, list[Change]] = {
    # What may be loaded, and by whom.
    "a lookup that is out of date is loaded": [(TRANSFERS, "if not load.is_there():", "if False:")],
    "loads are taken behind a hit whose last token is computed again": [
        (TRANSFERS, "if given and hit is not None and hit.num_tokens != start:", "if False:")
    ],
    "a child of a sequence that loads doesn't wait": [
        (TRANSFERS, "if job is not None and child.num_computed_tokens > job.start:", "if False:")
    ],
    "a cut within a load keeps a part of a block": [
        (JOBS, "return num_left // size * size if is_inside else num_left", "return num_left")
    ],
    "a sequence that lost its hit waits for the load behind it": [
        (
            JOBS,
            "return self.start_for(sequence) < self.start or sequence.num_computed_tokens <= self.start",
            "return False",
        )
    ],
    "a sequence keeps the slots of what didn't arrive": [(TRANSFERS, "if not is_whole:", "if False:")],
    "a transfer that failed counts as arrived": [
        (JOBS, "        if ok:\n            self._note_arrived", "        if True:\n            self._note_arrived")
    ],
    "blocks behind one that didn't arrive are cached": [
        (JOBS, "arrived.index(False) if False in arrived else len(arrived)", "sum(arrived)")
    ],
    "blocks that a sequence no longer has are cached": [
        (JOBS, "if index >= len(table) or table[index] is not block:", "if index >= len(table):")
    ],
    "a lost part of the hit before a load is forgotten": [
        (JOBS, "return self.start if lost_from is None else min", "return self.start if True else min")
    ],
    # Who holds what while it moves.
    "the device's blocks aren't held while they are stored": [
        (TRANSFERS, "self._slots.pool.touch(job.blocks)", "pass")
    ],
    "the device's blocks aren't held while they are loaded": [
        (TRANSFERS, "self._slots.pool.touch(job.held)", "job.held = []")
    ],
    "a store holds its blocks until its last transfer is answered": [
        (
            TRANSFERS,
            "if not (isinstance(job, LoadJob) and job.sequences):",
            "if isinstance(job, LoadJob) and not job.sequences:",
        ),
        (
            TRANSFERS,
            "        for table in tables:  # in order",
            "        for table in [job.blocks, *tables]:  # in order",
        ),
        (TRANSFERS, "and job.sequences else job.open_blocks() for", "and job.sequences else job.blocks for"),
    ],
    "a load that was given up holds its blocks until its last transfer is answered": [
        (TRANSFERS, "if not (isinstance(job, LoadJob) and job.sequences):", "if isinstance(job, StoreJob):"),
        (TRANSFERS, "still = {*job.open_blocks()}", "still = {*job.blocks}"),
        (TRANSFERS, "        job.held = []\n", "        job.held = job.blocks\n"),
        (TRANSFERS, "if isinstance(job, LoadJob) and job.sequences else", "if isinstance(job, LoadJob) else"),
    ],
    "slots aren't held while they are loaded": [
        (TRANSFERS, "        for pool, slots in job.parts:\n            pool.hold(slots)\n", "        job.parts = []\n")
    ],
    "a block is in two stores of one tier": [
        (TRANSFERS, "if first < len(prefix.blocks) and pool.is_in_store(prefix.blocks[first]):", "if False:"),
        (
            TRANSFERS,
            "moving = [n for n in range(number) if pool.is_in_store(prefix.blocks[first + n])]",
            "moving = [number]",
        ),
    ],
    "stores hold any number of blocks": [
        (TRANSFERS, "room = pool.max_storing - len(pool.storing)", "room = len(run.blocks)"),
    ],
    # What is lost, or forgotten.
    "loads aren't told of lost blocks": [(TRANSFERS, "job.note_lost(lost, prefixes)", "pass")],
    "stores aren't told of lost blocks": [
        (TRANSFERS, "pool.lost.update([block for block in blocks if pool.is_in_store(block)])", "pass")
    ],
    "bad blocks stay in tiers": [
        (TRANSFERS, "pool.drop_prefix(prefix.token_view(), prefix.extra_keys, len(prefix.blocks))", "pass")
    ],
    "what was stored of a dead step stays": [
        (TRANSFERS, "prefixes += [prefix for owner in owners for prefix in pool.drop_copies(owner, left)]", "pass")
    ],
    "a dead step takes what the tier had before": [
        (POOL, "if block in lost and self.copies.get(block) is slot:", "if block in lost:")
    ],
    "a reset leaves the tiers": [(TRANSFERS, "        for pool in self.pools:\n            pool.clear()\n", "")],
    "a salt is forgotten on the device alone": [
        (TRANSFERS, "return sum([pool.forget_salt(salt) for pool in self.pools])", "return 0")
    ],
    "slots whose load failed are found again": [
        (TRANSFERS, 'pool.drop([pool.pool.blocks[slot - first] for slot in transfer.slots], "aborted")', "pass")
    ],
    "blocks that changed while they were stored are cached": [
        (
            JOBS,
            "if not self._is_in_place(end) or self.blocks[end] in self.pool.lost:",
            "if self.blocks[end] in self.pool.lost:",
        )
    ],
    "a store is cached behind slots that were taken": [
        (JOBS, "if before is not None and not before.is_cached:", "if False:")
    ],
    "a store is cached behind a block that didn't arrive": [
        (JOBS, "while end < self.num_good and self._has_arrived[end]:", "while end < self.num_good:")
    ],
    "stores forget what is lost of blocks that wait for earlier ones": [
        (POOL, "return block in self.storing or block in self.arrived", "return block in self.storing")
    ],
    "a lost prefix is lost under every salt": [(PREFIX, "return keys == (other.extra_keys or {})", "return True")],
    # Quotas.
    "a tenant beyond its quota takes any slot": [
        (POOL, "if tenant.num_excess_blocks > 0 and not self._has_spare():", "if False:")
    ],
    "stores under way don't count for a quota": [
        (
            POOL,
            "sum([other == salt for moving in (self.storing, self.arrived) for other in moving.values()])",
            "0",
        )
    ],
    # What another manager is told.
    "keys that can't be read are restored": [(RESTORING, "(not identity.extra_keys or has_keys(identity))", "True")],
    "blocks of another size are restored": [(RESTORING, "elif len(identity.tokens) == size and", "elif")],
    "a slot is restored twice": [(RESTORING, "if len(set(numbers)) < len(numbers):", "if False:")],
    "a prefix's beginning is restored as older than its end": [
        (RESTORING, "if parent >= 0 and newest[parent] < newest[number]:", "if False:")
    ],
    "what others deleted is still found": [(RESTORING, "if len(held) > num_blocks:", "if False:")],
    "slots that were evicted are told as they were": [
        (
            CHANGES,
            "        self._changes.note_unstored(self.index.detached)\n",
            "",
        ),
    ],
    # Several groups.
    "a store of several groups is cached behind slots that were taken": [
        (
            JOBS,
            "        number = min(number, self._num_primary)\n        if number:\n",
            "        if number >= self._num_primary:\n            return None\n        if number:\n",
        )
    ],
    "a load relies on blocks of a window that were lost": [
        (JOBS, "if brought or is_same or not blocks.isdisjoint(self._relied_on):", "if brought or is_same:")
    ],
    "bad blocks of one group count as arrived": [(JOBS, "if self.num_good < len(self.blocks):", "if False:")],
    "a sequence goes on where its window lacks a block": [
        (JOBS, "if side_group.kind.first_needed(end) < first:", "if False:")
    ],
    "a sequence with windows keeps a part of its hit": [
        (
            JOBS,
            "return self.start if super().start_for(sequence) == self.start else 0",
            "return super().start_for(sequence)",
        )
    ],
    "what was stored of a dead step's windows stays": [
        (POOL, "if found is not None and self.copies[block] is found:", "if False:")
    ],
}

if __name__ == "__main__":
    sys.exit(find_all(FAULTS, TESTS))
