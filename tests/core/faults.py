"""Faults in the core, each of which `make test` must find: wrong hits, lost blocks, another order of reuse.

`python tests/core/faults.py [WORD ...]` makes each whose name has all the words, and says after how many seconds
which test found it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.faults import Change, find_all

QUEUE, INDEX, HIT, SLOTS = "core/free_queue.py", "core/prefix_index.py", "core/hit.py", "core/slots.py"
SEQUENCE, MANAGER = "core/sequence.py", "manager.py"

TESTS = (
    *(f"tests/core/test_{name}.py" for name in ("free_queue", "prefix_index", "pool", "duplicates", "steps")),
    *(
        f"tests/test_{name}.py"
        for name in ("worked_examples", "manager", "branching", "late_commit", "written", "stateful")
    ),
)
"""The quick ones first."""

FAULTS: dict[str, list[Change]] = {
    "a prefix's beginning is reused before its end": [
        (QUEUE, "self.release(cached + [*blocks[:num_cached]][::-1])", "self.release(cached + [*blocks[:num_cached]])")
    ],
    "a run counts as equal whatever its tokens are": [
        (INDEX, "if run.tokens.startswith(tokens[: max_blocks * size]):", "if True:")
    ],
    "keys aren't compared": [
        (INDEX, "count = run.num_equal_keys(0, extra_keys, first, count)", "pass"),
    ],
    "a hit that is out of date is taken": [(HIT, "is_outdated = is_doubtful and (", "is_outdated = False and (")],
    "a hit of another sequence is taken": [(HIT, "if hit.sequence is not sequence:", "if False:")],
    "a hit of another cache is taken": [(HIT, "if hit.source.index is not index:", "if False:")],
    "a hit's blocks aren't owned": [
        (SLOTS, "            self.pool.touch(held)\n            sequence", "            sequence")
    ],
    "free blocks of a hit count as room": [
        (SLOTS, "- sum([block.ref_cnt == 0 for block in touched])\n        if num_blocks", "\n        if num_blocks")
    ],
    "a child writes to the block that it shares": [
        (
            SLOTS,
            "            sequence.tail_owner = None\n            sequence.fits_below = 0\n        else:",
            "            child.tail_owner = self._change\n        else:",
        )
    ],
    "a cut sequence writes to blocks that are cached": [
        (SLOTS, "sequence.tail_owner = None  # its last block may be cached or shared", "pass")
    ],
    "a sequence from before a reset caches": [(SLOTS, "if sequence.epoch is not self._index.epoch:", "if False:")],
    "a report ends a loss of what was given": [
        (SEQUENCE, "if start >= self.first_own_token:", "if True:"),
        (SEQUENCE, "if lost_from is None or lost_from >= self.first_own_token else", "if True else"),
    ],
    "a copy of what is lost may be reported": [
        (
            SLOTS,
            "sequence.num_given_tokens = min(sequence.num_given_tokens, shared * self._block_size)\n",
            "sequence.first_own_token = sequence.num_given_tokens = shared * self._block_size\n",
        )
    ],
    "a loss of what is awaited is forgotten": [
        (
            SEQUENCE,
            "if num_tokens < (self.num_computed_tokens if self.lost_from is None else self.lost_from):",
            "if num_tokens < self.num_written_tokens:",
        )
    ],
    "what was computed from bad KV stays": [
        (MANAGER, "self._lose(self._with_computed_from(blocks), None)", "self._lose(dict.fromkeys(blocks, 0), None)")
    ],
    "bad KV is followed through one sequence only": [
        (MANAGER, "lost.setdefault(block, first)", "found = {**lost, block: first}")
    ],
    "who started after an abort loses nothing by the next": [
        (MANAGER, "        self._owners = None\n        self._link.num_started", "        self._link.num_started")
    ],
    "delayed tokens are found at once": [
        (
            SLOTS,
            "        if sequence.delayed_from is None:\n            sequence.delayed_from = num_tokens\n",
            "        pass\n",
        )
    ],
}

if __name__ == "__main__":
    sys.exit(find_all(FAULTS, TESTS))
