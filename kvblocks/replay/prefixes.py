"""The structure of a trace's prefixes: a tree of limited size, of runs of blocks, for an icicle picture."""

import numpy as np

from kvblocks.arguments import counted
from kvblocks.replay.result import PrefixNode
from kvblocks.replay.trace import Numbers, Trace

MAX_NODES = 2000
MAX_LEVELS = 64


def prefix_tree(trace: Trace, max_nodes: int = MAX_NODES) -> PrefixNode:
    """Return the root of the tree, which has the runs with the most references, those of all runs below included.

    A run is a stretch of blocks that the same requests have. Runs deeper than MAX_LEVELS are hidden. O(references), by
    NumPy, and O(runs).
    """
    runs = _Runs(trace)
    shown = runs.largest(max_nodes - 1)
    blocks, references = runs.hidden({-1, *shown})
    children: dict[int, list[PrefixNode]] = {run: [] for run in (-1, *shown)}
    for run in reversed(shown):  # children before their parents, the smallest first
        number = int(runs.num_sessions[run])
        node = PrefixNode(
            depth=int(runs.depths[run]),
            num_blocks=int(runs.lengths[run]),
            num_requests=int(runs.requests[run]),
            num_sessions=number,
            label=_label(trace, number, int(runs.sessions[run])),
            num_hidden_blocks=blocks.get(run, 0),
            num_hidden_references=references.get(run, 0),
            children=children[run][::-1],
        )
        children[int(runs.parents[run])].append(node)
    return PrefixNode(
        depth=0,
        num_blocks=0,
        num_requests=trace.num_requests,
        num_sessions=len(trace.session_names),
        label=counted(len(trace.session_names), "session"),
        num_hidden_blocks=blocks.get(-1, 0),
        num_hidden_references=references.get(-1, 0),
        children=children[-1][::-1],
    )


def _label(trace: Trace, number: int, session: int) -> str:
    return f"{number} sessions" if number > 1 else trace.session_names[session] or f"request {session}"


class _Runs:
    """The runs of a trace, as columns: first block, length, requests, sessions, parent, references of all below."""

    def __init__(self, trace: Trace) -> None:
        num_unique = trace.num_unique_blocks
        lengths = np.diff(trace.ends)
        parents = np.full(num_unique, -1, np.int64)
        depths = np.zeros(num_unique, np.int64)
        starts = np.repeat(trace.ends[:-1], lengths)
        places = np.arange(len(trace.blocks)) - starts
        depths[trace.blocks] = places
        inner = places > 0
        parents[trace.blocks[inner]] = trace.blocks[np.flatnonzero(inner) - 1]
        counts = np.bincount(trace.blocks, minlength=num_unique)
        sessions = np.repeat(trace.sessions, lengths)
        pairs = np.unique(trace.blocks.astype(np.int64) * len(trace.session_names) + sessions)
        num_sessions = np.bincount(pairs // len(trace.session_names), minlength=num_unique)
        one = np.zeros(num_unique, np.int64)
        one[trace.blocks] = sessions
        # A block continues the run above it if it is its parent's only child and has all of the parent's requests.
        children = np.bincount(parents[parents >= 0], minlength=num_unique)
        above = np.maximum(parents, 0)
        goes_on = (parents >= 0) & (children[above] == 1) & (counts[above] == counts)
        order = np.argsort(depths, kind="stable")
        heads = np.arange(num_unique)
        for block in order[goes_on[order]].tolist():
            heads[block] = heads[parents[block]]
        firsts, run_of = np.unique(heads, return_inverse=True)
        self.depths, self.requests = depths[firsts], counts[firsts]
        self.num_sessions, self.sessions = num_sessions[firsts], one[firsts]
        self.lengths = np.bincount(run_of, minlength=len(firsts))
        self.parents = np.where(parents[firsts] >= 0, run_of[np.maximum(parents[firsts], 0)], -1)
        self.levels = np.zeros(len(firsts), np.int64)  # number of runs above
        self.blocks_below, self.references_below = self._sums()

    def _sums(self) -> tuple[Numbers, Numbers]:
        """Return the numbers of blocks and references of each run with all below it. Fills in `levels`, too."""
        for run in np.argsort(self.depths, kind="stable").tolist():
            parent = int(self.parents[run])
            self.levels[run] = self.levels[parent] + 1 if parent >= 0 else 0
        blocks, references = self.lengths.copy(), self.lengths * self.requests
        for run in np.argsort(-self.depths, kind="stable").tolist():
            parent = int(self.parents[run])
            if parent >= 0:
                blocks[parent] += blocks[run]
                references[parent] += references[run]
        return blocks, references

    def largest(self, number: int) -> list[int]:
        """Return the runs with the most references, those below them included: largest first, each after its parent."""
        order = np.lexsort((np.arange(len(self.depths)), self.depths, -self.references_below))
        order = order[self.levels[order] < MAX_LEVELS]
        found: list[int] = order[:number].tolist()  # at equal numbers, the parent is less deep than its child
        return found

    def hidden(self, shown: set[int]) -> tuple[dict[int, int], dict[int, int]]:
        """Return the numbers of blocks and references in hidden runs, by the lowest shown run above them."""
        blocks: dict[int, int] = {}
        references: dict[int, int] = {}
        for run, parent in enumerate(self.parents.tolist()):
            if run not in shown and parent in shown:
                blocks[parent] = blocks.get(parent, 0) + int(self.blocks_below[run])
                references[parent] = references.get(parent, 0) + int(self.references_below[run])
        return blocks, references
