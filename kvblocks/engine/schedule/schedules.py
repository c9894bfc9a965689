"""The orders of admission by name, for options and flags."""

from kvblocks.engine.schedule.grouped_order import GroupedOrder
from kvblocks.engine.schedule.longest_prefix_order import LongestPrefixOrder
from kvblocks.engine.schedule.order import FirstCome, Order
from kvblocks.errors import InvalidArgumentError

SCHEDULES: dict[str, type[FirstCome | LongestPrefixOrder | GroupedOrder]] = {
    "fcfs": FirstCome,
    "longest-prefix": LongestPrefixOrder,
    "grouped": GroupedOrder,
}


def make_order(schedule: str) -> Order:
    """Return a new order of this name. Raises InvalidArgumentError."""
    if not isinstance(schedule, str) or schedule not in SCHEDULES:
        raise InvalidArgumentError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
    return SCHEDULES[schedule]()
