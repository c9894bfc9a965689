"""Checkpoints: copies of states in blocks of the pool, and where they are found.

A checkpoint after p tokens is attached to the node (run, position) of the primary block that ends at p, like the blocks
of side groups. It needs no key of its own, and can be found exactly as long as its whole prefix can. Either all of its
blocks are cached or none is: if one of them is taken for something else, the others are reused next.

Invariants: each checkpoint is at a cached position of its run; its blocks have the `run` and `index` of that position.
"""

from kvblocks.core.block import KVCacheBlock, Run


class Checkpoint:
    """A copy of the state after the tokens of a node (run, index). run: None once it is no longer cached.

    blocks: where the copy lies, in the order of its parts. position: how many tokens it is after; 0 if nobody needs to
    know. is_likely_end: whether hits will probably end here. Such a checkpoint is reused in order of last use, not
    before other cached blocks.
    """

    __slots__ = ("blocks", "index", "is_likely_end", "position", "run")

    def __init__(self, blocks: list[KVCacheBlock], position: int = 0, *, is_likely_end: bool) -> None:
        self.blocks = blocks
        self.position = position
        self.is_likely_end = is_likely_end
        self.run: Run | None = None
        self.index = 0

    @property
    def is_cached(self) -> bool:
        """Whether hits can find it. O(1)."""
        return self.run is not None and self.run.epoch.is_current


class Checkpoints:
    """All cached checkpoints, by run and position. num_blocks: how many blocks they take together."""

    def __init__(self) -> None:
        self._by_run: dict[Run, dict[int, Checkpoint]] = {}
        self.num_blocks = 0

    def at(self, primary: KVCacheBlock) -> Checkpoint | None:
        """Return the checkpoint at the end of a cached primary block; None if there is none. O(1)."""
        found = None if primary.run is None else self._by_run.get(primary.run)
        return None if found is None else found.get(primary.index)

    def of(self, block: KVCacheBlock) -> Checkpoint | None:
        """Return the checkpoint that `block` is a part of; None if it isn't part of any. O(its blocks)."""
        found = self.at(block)
        if found is None or found.run is None or found.run.blocks[found.index] is block:  # mostly it is the primary one
            return None
        if found.blocks[-1] is not block and block not in found.blocks:  # the last is reused first
            return None
        return found

    def in_run(self, run: Run) -> dict[int, Checkpoint]:
        """Return the checkpoints of a run, by position. Don't change them. O(1)."""
        return self._by_run.get(run, {})

    def num_with_last(self, run: Run) -> int:
        """Return how many blocks of a run, from the first, end with its last checkpoint; 0: none. O(checkpoints)."""
        found = self._by_run.get(run)
        return max(found) + 1 if found else 0

    def all(self) -> list[Checkpoint]:
        """Return all checkpoints. O(their number)."""
        return [checkpoint for found in self._by_run.values() for checkpoint in found.values()]

    def num_up_to_last(self, chain: list[KVCacheBlock], num_blocks: int) -> int:
        """Return how many of the first `num_blocks` blocks of a cached prefix end with its last checkpoint; 0 if none.

        chain: the primary blocks, all cached. O(runs + checkpoints of the last run that has one).
        """
        while num_blocks:
            block = chain[num_blocks - 1]
            run, index = block.run, block.index
            assert run is not None, f"{block}: isn't cached"
            found = self._by_run.get(run)
            if found is not None:
                if index in found:
                    return num_blocks
                before = max([position for position in found if position < index], default=-1)
                if before >= 0:
                    return num_blocks - (index - before)
            num_blocks -= index + 1  # to the run's parent
        return 0

    def add(self, primary: KVCacheBlock, checkpoint: Checkpoint) -> None:
        """Attach a checkpoint to a cached primary block, which has none. O(its blocks)."""
        run, index = primary.run, primary.index
        assert run is not None and run.epoch.is_current, f"{primary}: nothing can be attached to it"
        checkpoint.run, checkpoint.index = run, index
        for block in checkpoint.blocks:
            block.run = run
            block.index = index
        self._by_run.setdefault(run, {})[index] = checkpoint
        self.num_blocks += len(checkpoint.blocks)

    def remove(self, checkpoint: Checkpoint) -> None:
        """Detach a checkpoint. O(its blocks)."""
        run = checkpoint.run
        assert run is not None, "a checkpoint that isn't cached"
        found = self._by_run[run]
        del found[checkpoint.index]
        if not found:
            del self._by_run[run]
        for block in checkpoint.blocks:
            block.run = None
        checkpoint.run = None
        self.num_blocks -= len(checkpoint.blocks)

    def clear(self) -> None:
        """Forget all checkpoints, after a reset. O(1)."""
        self._by_run = {}
        self.num_blocks = 0

    def check(self) -> None:
        """Raise AssertionError unless the module's invariants hold. O(blocks)."""
        num_blocks = 0
        for run, found in self._by_run.items():
            assert found and run.epoch.is_current, f"{run}: checkpoints of what isn't cached"
            for position, checkpoint in found.items():
                assert position < len(run.blocks), f"{run}: a checkpoint of nothing at {position}"
                assert checkpoint.run is run and checkpoint.index == position, f"{run}: a checkpoint of another node"
                for block in checkpoint.blocks:
                    assert block.run is run and block.index == position, f"{block}: doesn't lead to its checkpoint"
                num_blocks += len(checkpoint.blocks)
        assert num_blocks == self.num_blocks, f"checkpoints: {num_blocks} blocks, {self.num_blocks} counted"
