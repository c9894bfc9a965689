"""Why a prefix missed where there are several groups: which of them ended the hit, and what it lacks."""

from dataclasses import replace

from kvblocks.core.caching import find_blocks
from kvblocks.core.sequence import Sequence
from kvblocks.groups.hit import longest_end
from kvblocks.groups.index import GroupIndex, history_key
from kvblocks.observe.explanation import Explanation, explain_miss


def explain_group_miss(index: GroupIndex, sequence: Sequence, num_taken_blocks: int) -> Explanation:
    """Return why the hit of a sequence ends where it does, as `explain_miss`, with the group that ended it.

    Changes nothing visible. O(runs + tokens).
    """
    size = index.block_size
    matched = find_blocks(index, sequence)
    end, _, limit = longest_end(index, matched, sequence.num_tokens)
    if limit is None:
        primary = index.layout.primary
        explanation = replace(explain_miss(index, sequence, num_taken_blocks), group=primary)
        return replace(explanation, num_cached_blocks=end // size, num_matched_blocks=len(matched))
    side_group = limit.side_group
    position, place = side_group.home(limit.number)
    removal = None
    if index.history is not None:
        removal = index.history.find(history_key(side_group.group, index.name(matched[position], side_group, place)))
    first = limit.number * side_group.block_size
    return Explanation(
        "group",
        end // size,
        sequence.num_tokens // size,
        removal,
        0 if removal is None else num_taken_blocks - removal.num_taken_blocks,
        group=side_group.group,
        window=side_group.window,
        num_matched_blocks=len(matched),
        missing_tokens=(first, first + side_group.block_size),
    )
