"""`StoreStats`: the counters of a store's client."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreStats:
    """What was done since the client was made.

    - num_lookups: requests to the store that asked for blocks.
    - num_written_blocks, num_written_bytes: what was sent.
    - num_present_blocks: blocks that were not sent, because the store had them or somebody else was sending them.
    - num_read_blocks, num_read_bytes: what was read and right.
    - num_missing_blocks: asked for, but gone.
    - num_damaged_blocks: read, but damaged or another block.
    - num_refused_blocks: blocks whose write the store refused, for example because it was full.
    - num_failures: calls that ended without all answers.
    - num_skipped: calls that were not made because of an earlier failure.
    - num_trimmed_blocks: blocks deleted to keep a quota.
    - is_away: whether the store counts as unreachable now.
    """

    num_lookups: int = 0
    num_written_blocks: int = 0
    num_written_bytes: int = 0
    num_present_blocks: int = 0
    num_read_blocks: int = 0
    num_read_bytes: int = 0
    num_missing_blocks: int = 0
    num_damaged_blocks: int = 0
    num_refused_blocks: int = 0
    num_failures: int = 0
    num_skipped: int = 0
    num_trimmed_blocks: int = 0
    is_away: bool = False
