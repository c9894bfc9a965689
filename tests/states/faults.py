"""Faults in the code of recurrent states, each of which the tests of `make test` must find.

`python tests/states/faults.py [WORD ...]` makes each whose name has all the words, and says after how many seconds
which test found it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.faults import Change, find_all

SLOTS, LIVE, ALLOCATOR = "core/states.py", "core/live_states.py", "core/side_slots.py"
CHECKPOINT, HIT, INDEX = "core/checkpoints.py", "core/longest_hit.py", "core/attached.py"
LAYOUT, MANAGER, TABLES = "core/layout.py", "manager.py", "core/tables.py"
ARRIVING, LOOKUP, JOBS = "core/arriving_states.py", "tiers/lookup.py", "tiers/jobs.py"
TIER_POOL, TIER_PREFIX, PREFIX_INDEX = "tiers/pool.py", "tiers/prefix.py", "core/prefix_index.py"

TESTS = tuple(
    f"tests/states/test_{name}.py"
    for name in ("states", "taking", "state_tiers", "state_walks", "state_stateful", "in_place")
)
"""The quick ones first."""

FAULTS: dict[str, list[Change]] = {
    "checkpoints outlive their prefix": [
        (
            INDEX,
            "if first <= position < end], reverse=True):",
            "if False], reverse=True):",
        )
    ],
    "a page of a checkpoint is evicted, and the others stay": [
        (INDEX, "checkpoint = None if self.checkpoints is None else self.checkpoints.of(block)", "checkpoint = None")
    ],
    "the other pages of an evicted checkpoint aren't reused next": [
        (INDEX, "self._index.detached += others[:-1] if", "self._index.detached += [] if True or")
    ],
    "an abort leaves a checkpoint that was not written, where a copy keeps the K and V": [
        (PREFIX_INDEX, "            attached.detach(block.run, block.index, block.index + 1)\n", "")
    ],
    "a hit may end at the last token": [(HIT, "end = min(end, (num_tokens - 1) // alignment * alignment)", "pass")],
    "a hit needs no checkpoint": [
        (HIT, "with_state = checkpoints.num_up_to_last(matched, end // size) * size", "with_state = end")
    ],
    "a hit ends a checkpoint too early": [
        (CHECKPOINT, "                if index in found:\n", "                if False:\n")
    ],
    "a stale hit is accepted": [
        (HIT, "if self.checkpoint is not None and not self.checkpoint.is_cached:", "if False:")
    ],
    "a reset keeps checkpoints": [(INDEX, "            self.checkpoints.clear()\n", "            pass\n")],
    # Slots.
    "a new slot isn't cleared": [
        (
            LIVE,
            "        self.pending[origin] = None\n",
            "        if copy.kind != 'clear':\n            self.pending[origin] = None\n",
        ),
        (LIVE, "            del self.pending[origin]\n", "            self.pending.pop(origin, None)\n"),
    ],
    "a slot isn't given back": [(LIVE, "        self.free_slots.append(state.slot)\n", "")],
    "a child has its parent's slot": [
        (LIVE, '("fork", position, self.free_slots.pop(), state.slot)', '("fork", position, state.slot, state.slot)'),
    ],
    "what a child's copy reads isn't there": [
        (LIVE, "            parent.num_readers += 1\n", "            pass\n"),
        (LIVE, "                origin.num_readers -= 1\n", "                pass\n"),
    ],
    "copies for nobody are made": [(LIVE, "                origin.num_readers -= 1\n", "                pass\n")],
    "a child's copy comes before those that were asked for earlier": [
        (LIVE, "        self.pending[origin] = None\n", "        self.pending = {origin: None, **self.pending}\n")
    ],
    "a child doesn't own the checkpoint that it is restored from": [
        (SLOTS, "self._pool.touch(copy.restoring)", "copy.restoring = []")
    ],
    "a copy to the slot of a sequence that ended is made": [
        (LIVE, "        self.drop_origin(state)\n        del", "        del")
    ],
    "a restored checkpoint isn't owned until its copy is taken": [
        (
            SLOTS,
            "            state.made.append(checkpoint)\n        if epoch",
            "            self.pool.release_table(state.restoring)\n            state.restoring = []\n        if epoch",
        )
    ],
    "pages are restored in another order": [(LIVE, "for block in restoring]))", "for block in restoring[::-1]]))")],
    # When a checkpoint is found.
    "checkpoints are found when they are allocated": [
        (
            SLOTS,
            "            self.live.wanted[sequence] = end\n",
            (
                "            saved: list[Checkpoint] = []\n"
                "            self._save(sequence, end, self.early, saved)\n"
                "            for found in saved:\n"
                "                self._release(found.blocks, is_likely_end=found.is_likely_end)\n"
            ),
        ),
        (SLOTS, "after: list[StateCopy] = []\n        saved", "after, self.early = self.early, []\n        saved"),
        (
            SLOTS,
            "        self._checkpoints = attached.checkpoints\n",
            "        self._checkpoints, self.early = attached.checkpoints, []\n",
        ),
    ],
    "a checkpoint is attached to the block before": [
        (
            SLOTS,
            "attach_checkpoint(sequence.blocks[number - 1],",
            "attach_checkpoint(sequence.blocks[max(0, number - 2)],",
        )
    ],
    "a delayed checkpoint is found at once": [
        (SLOTS, "waits = sequence.delayed_from is not None and sequence.delayed_from < position", "waits = False")
    ],
    "a save that waits survives a rewind": [(SLOTS, "        self._drop_waiting(state, num_computed)\n", "")],
    "an untaken save of a sequence that ended is made": [(LIVE, "        self.wanted.pop(sequence, None)\n", "")],
    # Room.
    "saves take blocks without looking whether they are free": [
        (SLOTS, "if self._pool.queue.num_free_blocks < states.num_blocks:", "if False:")
    ],
    "a checkpoint of the step may be evicted by the next one": [
        (SLOTS, "        saved.append(checkpoint)\n", "        self._release(blocks, is_likely_end=is_likely_end)\n")
    ],
    "checkpoints aren't queued behind their sequence's blocks": [
        (SLOTS, "        for checkpoint in state.made:\n", "        for checkpoint in state.made[:0]:\n")
    ],
    "a pin doesn't hold the checkpoint at its end": [
        (SLOTS, "self._slots.soft_holds.extend(sequence)  # now", "pass  # now")
    ],
    # Going back.
    "a rewind goes back to where no checkpoint is": [
        (MANAGER, "            end = self._recurrent.floor_of(own, end)\n", "            pass\n"),
        (SLOTS, '            assert found is not None, f"{sequence}: went back to where no checkpoint is"\n', ""),
    ],
    "a rewind restores nothing": [(MANAGER, "self._recurrent.go_back(sequence, num_tokens)", "pass")],
    "a state may go back any number of tokens": [(SLOTS, "        if num_tokens < least:\n", "        if False:\n")],
    "a state may go back one token too many": [(SLOTS, "if num_tokens < least:", "if num_tokens + 1 < least:")],
    "pins don't hold what decoded tokens fill": [
        (ALLOCATOR, "        if self._slots.soft_holds is not None and is_cached:", "        if False:")
    ],
    "a state may go back twice": [
        (SLOTS, "        state.start = max(state.start, sequence.num_computed_tokens - self.live.num_kept)\n", "")
    ],
    # Tiers.
    "a tier's hit needs no checkpoint": [
        (
            LOOKUP,
            "end = max([place.last_checkpoint(end) for place in places]) // layout.alignment * layout.alignment",
            "pass",
        )
    ],
    "a checkpoint that arrived in part is attached": [
        (JOBS, "for first in prefix.whole_states(end):", "for first in prefix.whole_states(len(side)):")
    ],
    "a slot is restored before its state has arrived": [
        (
            LIVE,
            "        state.arriving = arriving\n        return state\n",
            (
                "        state.arriving = arriving\n"
                "        self._bring(state, _copy_into(state.slot, arriving.end, arriving.blocks), None)\n"
                "        return state\n"
            ),
        )
    ],
    "a slot isn't restored when its state has arrived": [
        (
            ARRIVING,
            "        states.restart(state, arriving.end, arriving.blocks)\n",
            "        pool.release_table(arriving.blocks)\n",
        )
    ],
    "loads that fail leave the slot as it is": [
        (ARRIVING, "    if num_tokens == arriving.start:\n", "    if False:\n"),
        (
            SLOTS,
            "        self.live.restart(state, num_tokens, blocks)\n",
            "        self.pool.release_table(blocks)\n        state.restoring = []\n",
        ),
    ],
    "the hit's checkpoint isn't owned while a load may fail": [
        (ALLOCATOR, "for checkpoint in (parts.checkpoint, loads.arriving):", "for checkpoint in (loads.arriving,):"),
        (
            ARRIVING,
            "fallback = [] if parts.checkpoint is None else parts.checkpoint.blocks",
            "fallback: list[KVCacheBlock] = []",
        ),
    ],
    "states that wait for a load are saved": [
        (SLOTS, "while state.next_place < end + (state.arriving is not None):", "while state.next_place < end:")
    ],
    "a load in part counts as whole": [
        (JOBS, "return self.end_token if all(arrived) else self.start_for(sequence)", "return self.end_token")
    ],
    "pages are stored in another order": [
        (
            TIER_PREFIX,
            "            self.blocks = self.blocks + blocks\n",
            "            self.blocks = self.blocks + blocks[::-1]\n",
        )
    ],
    "pages are restored from a disk in another order": [
        (TIER_POOL, "for column in sorted(slots)]", "for column in sorted(slots)[::-1]]")
    ],
    # Places.
    "marks aren't rounded to the alignment": [
        (SLOTS, "place = position // self._alignment * self._alignment", "place = position")
    ],
    "only the prompt's end is saved after a preemption": [
        (
            SLOTS,
            "step, num_tokens = self._alignment, sequence.num_tokens",
            "step, num_tokens = self._alignment, sequence.num_prompt_tokens",
        )
    ],
    "where two prompts part nothing is saved": [
        (SLOTS, "places.add(min(last, max(hit.num_matched_tokens, hit.parts.num_tier_tokens) // step * step))", "pass")
    ],
    "a chunk may end behind what the scheduler asked for": [
        (SLOTS, "        return min(place, max_end)\n", "        return place if place < 1 << 60 else max_end\n")
    ],
    "the state's block size doesn't matter": [
        (
            LAYOUT,
            "self.alignment = max([group.block_size for group in groups if group.has_tokens])",
            "self.alignment = max([group.block_size for group in groups if group.has_table])",
        )
    ],
}

if __name__ == "__main__":
    sys.exit(find_all(FAULTS, TESTS))
