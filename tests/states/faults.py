"""Faults in the code of recurrent states, each of which the walks must find, or they would prove nothing.

A fault is a change of the sources: in a file, a text that it has once, and what stands there instead. `PYTHONPATH=.
python tests/states/faults.py [WORD ...]` makes each whose name has all the words in a copy of the package, walks with
it, and says after how many seconds what found it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SLOTS, LIVE = "states/slots.py", "groups/states/live.py"
CHECKPOINT, HIT, INDEX = "groups/states/checkpoint.py", "groups/hit.py", "groups/index.py"
LAYOUT, MANAGER, GROUP_SLOTS = "groups/layout.py", "manager.py", "groups/slots.py"
ARRIVING, HOLDERS, JOBS = "states/arriving.py", "tiers/grouped/holders.py", "tiers/grouped/jobs.py"
TIER_POOL, TIER_PREFIX = "tiers/grouped/pool.py", "tiers/grouped/prefix.py"

Change = tuple[str, str, str]
"""A file, a text that it has once, and what replaces it."""

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
        (INDEX, "self.detached += others[:-1] if", "self.detached += [] if True or")
    ],
    "an abort leaves a checkpoint that was not written, where a copy keeps the K and V": [
        (INDEX, "            self._detach(block.run, block.index, block.index + 1)\n", "")
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
            "        self.before.insert(index, origin)\n",
            "        if origin.kind != 'clear':\n            self.before.insert(index, origin)\n",
        ),
        (
            LIVE,
            "            self.before.remove(state.origin)\n",
            "            self.before = [copy for copy in self.before if copy is not state.origin]\n",
        ),
    ],
    "a slot isn't given back": [(LIVE, "        self.free_slots.append(state.slot)\n", "")],
    "a twin has its parent's slot": [
        (LIVE, 'StateCopy("fork", position, slot, state.slot)', 'StateCopy("fork", position, state.slot, state.slot)'),
    ],
    "a twin's state is copied behind all others": [
        (LIVE, "[*state.restoring], index)", "[*state.restoring], len(self.before))")
    ],
    "a twin doesn't own the checkpoint that it is restored from": [
        (SLOTS, "self.pool.touch(copy.restoring)", "copy.restoring = []")
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
            "            self.states.wanted[sequence] = end\n",
            (
                "            saved: list[Checkpoint] = []\n"
                "            self._save(sequence, end, self.early, saved)\n"
                "            for found in saved:\n"
                "                self._release(found.blocks, is_landmark=found.is_landmark)\n"
            ),
        ),
        (SLOTS, "after: list[StateCopy] = []\n        saved", "after, self.early = self.early, []\n        saved"),
        (
            SLOTS,
            "        self._checkpoints = checkpoints\n",
            "        self._checkpoints, self.early = checkpoints, []\n",
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
    "a save that waits survives a rewind": [
        (SLOTS, "        self._drop_waiting(state, sequence.num_computed_tokens)\n", "")
    ],
    "an untaken save of a sequence that ended is made": [(LIVE, "        self.wanted.pop(sequence, None)\n", "")],
    # Room.
    "saves take blocks without looking whether they are free": [
        (SLOTS, "if self.pool.queue.num_free_blocks < states.num_blocks:", "if False:")
    ],
    "a checkpoint of the step may be evicted by the next one": [
        (SLOTS, "        saved.append(checkpoint)\n", "        self._release(blocks, is_landmark=is_landmark)\n")
    ],
    "checkpoints aren't queued behind their sequence's blocks": [
        (SLOTS, "        for checkpoint in state.made:\n", "        for checkpoint in state.made[:0]:\n")
    ],
    "a pin doesn't hold the checkpoint at its end": [(SLOTS, "self.soft_holds.extend(sequence)  # now", "pass  # now")],
    # Going back.
    "a rewind goes back to where no checkpoint is": [
        (MANAGER, "            end = self._state_slots.floor_of(own, end)\n", "            pass\n"),
        (SLOTS, '            assert found is not None, f"{sequence}: went back to where no checkpoint is"\n', ""),
    ],
    "a rewind restores nothing": [(MANAGER, "self._state_slots.go_back(sequence, num_tokens)", "pass")],
    "a state may go back any number of tokens": [(SLOTS, "        if num_tokens < least:\n", "        if False:\n")],
    "a state may go back one token too many": [(SLOTS, "if num_tokens < least:", "if num_tokens + 1 < least:")],
    "pins don't hold what decoded tokens fill": [
        (SLOTS, "        if self.soft_holds is not None and is_cached:", "        if False:")
    ],
    "a state may go back twice": [
        (SLOTS, "        state.start = max(state.start, sequence.num_computed_tokens - self.states.num_kept)\n", "")
    ],
    # Tiers.
    "a tier's hit needs no checkpoint": [
        (
            HOLDERS,
            "end = max([place.last_checkpoint(end) for place in places]) // layout.alignment * layout.alignment",
            "pass",
        )
    ],
    "a checkpoint that arrived in part is attached": [
        (JOBS, "for first in prefix.whole_states(len(arrived)):", "for first in prefix.whole_states(len(side)):")
    ],
    "a slot is restored before its state has arrived": [
        (
            LIVE,
            "        state.origin, state.arriving = None, arriving\n",
            (
                "        state.arriving = arriving\n        self.before.append(state.origin)\n"
                "        self.starting.append(state)\n        state.restoring = []\n"
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
            "        self.states.restart(state, num_tokens, blocks)\n",
            "        self.pool.release_table(blocks)\n        state.restoring = []\n",
        ),
    ],
    "the hit's checkpoint isn't owned while a load may fail": [
        (GROUP_SLOTS, "for checkpoint in (hit.checkpoint, hit.arriving):", "for checkpoint in (hit.arriving,):"),
        (
            ARRIVING,
            "fallback = [] if hit.checkpoint is None else hit.checkpoint.blocks",
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
        (TIER_PREFIX, "            self.blocks += blocks\n", "            self.blocks += blocks[::-1]\n")
    ],
    "pages are restored from a disk in another order": [
        (TIER_POOL, "for column in sorted(slots)]", "for column in sorted(slots)[::-1]]")
    ],
    # Places.
    "marks aren't rounded to the alignment": [
        (SLOTS, "place = position // self.alignment * self.alignment", "place = position")
    ],
    "only the prompt's end is saved after a preemption": [
        (
            SLOTS,
            "step, num_tokens = self.alignment, sequence.num_tokens",
            "step, num_tokens = self.alignment, sequence.num_prompt_tokens",
        )
    ],
    "where two prompts part nothing is saved": [
        (SLOTS, "places.add(min(last, max(hit.num_matched_tokens, hit.num_tier_tokens) // step * step))", "pass")
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

WALK = """
import sys
sys.path.insert(0, sys.argv[1])
from states.faults import find_fault
print(find_fault(int(sys.argv[2])))
"""


def find_fault(num_rounds: int) -> str:
    """Walk until something is wrong, and say what; "" if nothing is in so many rounds."""
    from model.history import RandomChooser, walk
    from states.test_state_stateful import STATE_SETS, make_history
    from states.test_state_walks import walk as walk_states

    for seed in range(num_rounds):
        for number, name in enumerate(STATE_SETS):
            try:
                walk(
                    make_history(name, "xxh3_128"),
                    RandomChooser(seed),
                    num_operations=200,
                    reset_every=45,
                    forget_every=70,
                )
                walk_states(seed * len(STATE_SETS) + number, num_steps=200)
                walk_states(seed * len(STATE_SETS) + number, num_steps=300, has_tiers=True)
            except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  # whatever a fault brings about
                notes = "; ".join(getattr(error, "__notes__", []))
                return f"{name}: {notes}: {type(error).__name__}: {str(error)[:160]}"
    return ""


def changed(name: str) -> dict[str, str]:
    """Return the sources that a fault changes, by file. Raises AssertionError if a text isn't there once."""
    sources: dict[str, str] = {}
    for file, text, replacement in FAULTS[name]:
        source = sources.get(file) or (ROOT / "kvblocks" / file).read_text()
        assert source.count(text) == 1, f"{name}: {file} has {source.count(text)} times: {text}"
        sources[file] = source.replace(text, replacement)
    return sources


def run(name: str, num_rounds: int) -> str:
    """Walk with a fault; returns what found it, "" if nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "kvblocks"
        shutil.copytree(ROOT / "kvblocks", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        for file, source in changed(name).items():
            (package / file).write_text(source)
        command = [sys.executable, "-c", WALK, str(ROOT / "tests"), str(num_rounds)]
        environment = os.environ | {"PYTHONPATH": folder}
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stderr}"
        return done.stdout.strip()


if __name__ == "__main__":
    survivors = []
    chosen = [name for name in FAULTS if all(word in name for word in sys.argv[1:])]
    for number, one in enumerate(chosen, 1):
        start = time.monotonic()
        found = run(one, num_rounds=25)
        survivors += [one] * (not found)
        print(f"{number} {one}: {time.monotonic() - start:.0f} s, {found or 'SURVIVES'}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} were found")
    sys.exit(bool(survivors))
