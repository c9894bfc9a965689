"""Recording what gets cached and removed, for the `take_events` of a manager or a `PrefixCache`."""

from kvblocks.core.hashing import Names
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.events import CacheEvent, EventOptions
from kvblocks.observe.event_log import Records
from kvblocks.observe.shared_names import SharedNames


class Recording:
    """The records since last taken. log: where they are written."""

    def __init__(self, log: Records, index: PrefixIndex, names: Names) -> None:
        """Record from now on what `index`, which must be empty, caches and removes, by these names."""
        self.log = log
        self._shared_names = None if names.are_unique else SharedNames()
        index.record(log, names)

    def take(self) -> list[CacheEvent]:
        """Return the changes since the last call, oldest first, and forget them.

        O(1); or O(blocks in the events) if several prefixes may share a name.
        """
        events = self.log.take()
        return events if self._shared_names is None else self._shared_names.told(events)


def start_recording(options: EventOptions, index: PrefixIndex, names: Names, *, has_side_groups: bool) -> Recording:
    """Record from now on what `index`, which must be empty, caches and removes.

    has_side_groups: whether the manager has groups besides a primary one.
    """
    if not has_side_groups:
        return Recording(Records(options), index, names)
    from kvblocks.observe.group_log import make_group_log

    return Recording(make_group_log(options, index), index, names)
