"""`Nowhere`: takes a store's place where the volume is too full even for an empty store. It holds nothing."""

from collections.abc import Iterable, Mapping

from kvblocks import BlockIdentity
from kvblocks.tiers.disk import DiskStats


class Nowhere:
    """As `DiskStore`, without slots. So every lookup is a miss, every store fails, and vLLM serves all the same."""

    num_slots = 0
    needs_sync = has_uses = False
    stats = DiskStats()

    def remembered(self) -> list[tuple[int, BlockIdentity]]:
        """Nothing."""
        return []

    def write(self, slots: Iterable[int], identities: Iterable[BlockIdentity], payload: memoryview) -> None:
        """Never called: there are no slots."""

    def read(self, slots: Iterable[int], identities: Iterable[BlockIdentity], out: memoryview) -> int:  # noqa: ARG002
        """Never called: there are no slots."""
        return 0

    def remember(self, changes: Mapping[int, BlockIdentity | None]) -> None:
        """Nothing: there are no slots."""

    def note_used(self, slots: Iterable[int]) -> None:
        """Nothing: there are no slots."""

    def sync(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
