"""Recording what gets cached and removed, for the `take_events` of a manager or a `PrefixCache`."""

from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.events import CacheEvent, EventOptions
from kvblocks.hashing.scheme import HashScheme
from kvblocks.observe.event_log import Records
from kvblocks.observe.shared_hashes import SharedHashes


class Recording:
    """The records since last taken. log: where they are written."""

    def __init__(self, log: Records, index: PrefixIndex, hash_scheme: HashScheme) -> None:
        """Record from now on what `index`, which must be empty, caches and removes, with digests of this scheme."""
        self.log = log
        self._shared_hashes = None if hash_scheme.are_unique else SharedHashes()
        index.record(log, hash_scheme)

    def take(self) -> list[CacheEvent]:
        """Return the changes since the last call, oldest first, and forget them.

        O(1); or O(blocks in the events) if several prefixes may share a digest.
        """
        events = self.log.take()
        return events if self._shared_hashes is None else self._shared_hashes.told(events)


def start_recording(options: EventOptions, index: PrefixIndex, hash_scheme: HashScheme) -> Recording:
    """Record from now on what `index`, which must be empty, caches and removes."""
    return Recording(Records(options, index.attached), index, hash_scheme)
