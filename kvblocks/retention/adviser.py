"""An eviction policy, the blocks that it was told of, and the checks of what it answers.

A policy may be the caller's own code, so an adviser trusts nothing that it does. If the policy raises, or names a block
that it was not told of, the adviser counts a failure and gives no advice. KeyboardInterrupt and the like pass through.
"""

from collections.abc import Callable, Hashable
from operator import index
from typing import Any

from kvblocks.arguments import wrong
from kvblocks.core.block import KVCacheBlock
from kvblocks.retention.policies.policy import FreeBlock

_CALLS = ("free", "use", "remove", "victim")
_MORE_CALLS = ("begin", "pause", "end")  # a policy may have these


class Setting:
    """What the policies of one cache share. now: the caller's clock, as last set. num_failures: see `Adviser`."""

    def __init__(self) -> None:
        self.now: Any = 0.0
        self.num_failures = 0


class View:
    """A `CacheView`: what a policy may ask. Nothing in it can change the cache."""

    def __init__(self, setting: Setting, blocks: dict[int, KVCacheBlock], num_blocks: int) -> None:
        self._setting = setting
        self._blocks = blocks
        self._num_blocks = num_blocks

    @property
    def num_blocks(self) -> int:
        """As `CacheView.num_blocks`."""
        return self._num_blocks

    @property
    def now(self) -> Any:
        """As `CacheView.now`."""
        return self._setting.now

    def digest(self, block_id: Any) -> bytes | None:
        """As `CacheView.digest`."""
        block = self._blocks.get(block_id)
        return None if block is None else block.block_hash


class Adviser:
    """One policy. blocks: the free cached blocks that it was told of, by their ids.

    num_failures of `setting` counts calls of the policy that raised, and answers that name no block it was told of.
    """

    def __init__(self, make: Callable[[Any], Any], setting: Setting, num_blocks: int) -> None:
        """make: makes the policy. Raises InvalidArgumentError if it makes no policy, and what `make` raises."""
        self._setting = setting
        self.blocks: dict[int, KVCacheBlock] = {}
        try:
            policy = make(View(setting, self.blocks, num_blocks))
        except TypeError as error:
            raise wrong("eviction", f"a function from a CacheView to a policy; it says {error}", make) from error
        calls: list[Any] = [getattr(policy, name, None) for name in _CALLS]
        if not all(map(callable, calls)):
            raise wrong("eviction", f"it to make policies that have {', '.join(_CALLS)}", policy)
        more: list[Any] = [getattr(policy, name, None) for name in _MORE_CALLS]
        if not all([call is None or callable(call) for call in more]):  # noqa: C419
            raise wrong("eviction", f"it to make policies whose {', '.join(_MORE_CALLS)} can be called", policy)
        self._free, self._use, self._remove, self._victim = calls
        self._begin, self._pause, self._end = more

    def free(self, blocks: list[KVCacheBlock], records: list[FreeBlock]) -> None:
        """Tell the policy of blocks that became free, with a record of each. O(blocks)."""
        for block in blocks:
            self.blocks[block.block_id] = block
        try:
            self._free(records)
        except Exception:  # noqa: BLE001  # whatever a policy raises
            self._setting.num_failures += 1

    def use(self, block_ids: list[int]) -> None:
        """Tell the policy of blocks that it knew and that have owners again. O(blocks)."""
        self._forget(self._use, block_ids)

    def remove(self, block_ids: list[int]) -> None:
        """Tell the policy of blocks that it knew and that are no longer cached. O(blocks)."""
        self._forget(self._remove, block_ids)

    def begin(self, session: Hashable, tenant: str | None) -> None:
        """Tell the policy, if it wants to know, that a session's request begins. O(1)."""
        if self._begin is not None:
            try:
                self._begin(session, tenant)
            except Exception:  # noqa: BLE001
                self._setting.num_failures += 1

    def pause(self, session: Hashable, tenant: str | None, reason: str) -> None:
        """Tell the policy, if it wants to know, that a session pauses. O(1)."""
        if self._pause is not None:
            try:
                self._pause(session, tenant, reason)
            except Exception:  # noqa: BLE001
                self._setting.num_failures += 1

    def end(self, session: Hashable, tenant: str | None) -> None:
        """Tell the policy, if it wants to know, that a session has ended. O(1)."""
        if self._end is not None:
            try:
                self._end(session, tenant)
            except Exception:  # noqa: BLE001
                self._setting.num_failures += 1

    def ask(self, num_blocks: int) -> KVCacheBlock | None:
        """Return the victim, a free cached block; None if the policy names none or fails."""
        block: KVCacheBlock | None = None
        try:
            answer = self._victim(num_blocks)
            if answer is None:
                return None
            block = self.blocks.get(index(answer))
        except Exception:  # noqa: BLE001
            block = None
        # Blocks that it was told of are free and cached. An owned one must never be evicted, so this checks it again.
        if block is None or block.ref_cnt or not block.is_cached:
            self._setting.num_failures += 1
            return None
        return block

    def _forget(self, tell: Any, block_ids: list[int]) -> None:
        try:
            tell([*block_ids])  # a copy, since the policy may keep or change the list
        except Exception:  # noqa: BLE001
            self._setting.num_failures += 1
        for block_id in block_ids:
            del self.blocks[block_id]
