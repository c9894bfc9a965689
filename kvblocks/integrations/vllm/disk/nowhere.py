"""`Nowhere`: an empty store, used when the volume is too full even for a new `DiskStore`."""

from collections.abc import Iterable, Mapping

from kvblocks import BlockIdentity
from kvblocks.tiers.disk import DiskStats


class Nowhere:
    """A `DiskStore` without slots. Every lookup is a miss and every store fails, but vLLM can serve."""

    num_slots = 0
    needs_sync = has_uses = False
    stats = DiskStats()

    def remembered(self) -> list[tuple[int, BlockIdentity]]:
        """Return nothing."""
        return []

    def write(self, slots: Iterable[int], identities: Iterable[BlockIdentity], payload: memoryview) -> None:
        """Never called: there are no slots."""

    def read(self, slots: Iterable[int], identities: Iterable[BlockIdentity], out: memoryview) -> int:  # noqa: ARG002
        """Never called: there are no slots."""
        return 0

    def remember(self, changes: Mapping[int, BlockIdentity | None]) -> None:
        """Do nothing: there are no slots."""

    def note_used(self, slots: Iterable[int]) -> None:
        """Do nothing: there are no slots."""

    def sync(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
