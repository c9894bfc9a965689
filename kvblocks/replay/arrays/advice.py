"""The eviction policy of an `AdvisedPool`, and the view that it may ask. Blocks are their numbers in the trace."""

from operator import index
from typing import Any

from kvblocks.retention.policies import find_factory

_CALLS = ("free", "use", "begin", "pause", "end")  # a policy need not have the last three


class ArrayView:
    """A `CacheView`. numbers: for each block, when it was released; 0 if the policy doesn't know it."""

    def __init__(self, num_blocks: int, numbers: "memoryview[int]") -> None:
        self.num_blocks = num_blocks
        self.now: Any = 0.0
        self._numbers = numbers

    def digest(self, block_id: Any) -> bytes | None:
        """As `CacheView.digest`."""
        known = 0 <= block_id < len(self._numbers) and self._numbers[block_id]
        return int(block_id).to_bytes(8, "little") if known else None


class ArrayAdvice:
    """Protects a run from a policy's exceptions, like `retention.adviser.Adviser` but without a record of each block.

    num_failures: how many calls raised, or named a block that the policy hadn't been told of.
    """

    def __init__(self, eviction: Any, num_blocks: int, numbers: "memoryview[int]") -> None:
        """eviction: a name, or what makes a policy."""
        self.view = ArrayView(num_blocks, numbers)
        policy: Any = find_factory(eviction)(self.view)
        self._calls: dict[str, Any] = {name: getattr(policy, name, None) for name in _CALLS}
        self._victim, self._remove = policy.victim, policy.remove
        self._numbers = numbers
        self.num_failures = 0

    def tell(self, call: str, *given: Any) -> None:
        """Make a call of the policy that returns nothing, if the policy has it."""
        known = self._calls[call]
        if known is None:
            return
        try:
            known(*given)
        except Exception:  # noqa: BLE001  # whatever a policy raises
            self.num_failures += 1

    def tell_removed(self, blocks: list[int]) -> None:
        """Make the call "remove" for many blocks. It is the most frequent one."""
        try:
            self._remove(blocks)
        except Exception:  # noqa: BLE001
            self.num_failures += 1

    def ask(self, num_blocks: int) -> int | None:
        """Return the victim, or None if the policy names none or fails."""
        try:
            answer = self._victim(num_blocks)
            if answer is None:
                return None
            block = index(answer)
        except Exception:  # noqa: BLE001
            block = -1
        if 0 <= block < len(self._numbers) and self._numbers[block]:
            return block
        self.num_failures += 1
        return None
