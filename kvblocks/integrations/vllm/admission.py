"""vLLM's admission rules with kvblocks' numbers: whether a request must wait although there are enough blocks."""

from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus

from kvblocks import CacheHit, Group, KVCacheManager, Sequence

WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class RoomNeeded(NamedTuple):
    """The room that a request asks for.

    num_slots: the slots that it needs now, in all. num_full_tokens: the tokens that must fit as a whole, or 0.
    num_reserved_blocks: the blocks that other requests in flight rely on. has_scheduled_reqs: whether any request runs
    in this step.
    """

    num_slots: int
    num_full_tokens: int
    num_reserved_blocks: int
    has_scheduled_reqs: bool


class Admission:
    """The rules of one manager. sequences: by request id. caps: for each group, the most blocks of a request."""

    def __init__(
        self, manager: KVCacheManager, sequences: dict[str, Sequence], caps: list[int], watermark_blocks: int
    ) -> None:
        self._manager = manager
        self._sequences = sequences
        self._groups: tuple[Group, ...] = manager.groups
        self._caps = caps
        self._watermark_blocks = watermark_blocks

    def is_held_back(self, request: Any, sequence: Sequence, hit: CacheHit | None, room: RoomNeeded) -> bool:
        """Whether a request must wait because of a watermark, its whole prompt's room, or other requests."""
        watermark = self._watermark_blocks if room.has_scheduled_reqs and request.status in WAITING else 0
        if not (watermark or room.num_full_tokens or room.num_reserved_blocks):
            return False
        num_free = self._manager.num_free_blocks
        if room.num_full_tokens and self.num_blocks(sequence, hit, room.num_full_tokens) + watermark > num_free:
            return True
        num_needed = self._manager.get_num_blocks_to_allocate(sequence, room.num_slots, hit=hit)
        return num_needed + watermark > num_free - room.num_reserved_blocks

    def num_blocks(self, sequence: Sequence, hit: CacheHit | None, num_tokens: int) -> int:
        """Return how many free blocks a sequence takes to get to `num_tokens` tokens.

        A window gives up blocks on the way, so its group counts at most its cap. A recurrent state takes one block.
        """
        number = 0
        for group, (kind, cap) in enumerate(zip(self._groups, self._caps, strict=True)):
            held: list[Any] = []
            if hit is not None:
                held = hit.group_blocks(group)
                number += sum(block is not None and not block.ref_cnt for block in held)
            elif sequence.is_allocated:
                held = sequence.group_blocks(group)
            lacking = max(0, min(-(-num_tokens // kind.block_size), cap) - len(held))
            number += min(1, lacking) if kind.has_gaps else lacking
        return number

    def most_pool_tokens(self, num_tokens: int) -> int:
        """Return how many tokens the pool has room for if all sequences have `num_tokens` tokens."""
        each = 0
        for kind, cap in zip(self._groups, self._caps, strict=True):
            each += kind.num_blocks(num_tokens) if kind.has_gaps else min(-(-num_tokens // kind.block_size), cap)
        return self._manager.num_blocks * num_tokens // each

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Any,
        apply_admission_cap: bool = False,
        **_: Any,  # encoders, loads and recurrent states make no difference
    ) -> int:
        """Return how many more blocks a request takes, as vLLM's coordinator does."""
        sequence = self._sequences.get(request_id)
        if sequence is None or not sequence.is_allocated:
            sizes = [group.block_size for group in self._groups]
            lacking = [
                max(0, -(-num_tokens // size) - len(blocks))
                for size, blocks in zip(sizes, new_computed_blocks, strict=True)
            ]
            return sum(min(1, n) if kind.has_gaps else n for n, kind in zip(lacking, self._groups, strict=True))
        if apply_admission_cap:
            return self.num_blocks(sequence, None, num_tokens)
        return self._manager.get_num_blocks_to_allocate(sequence, num_tokens)
