"""Encoder-decoder models (Whisper): blocks for cross attention in addition to those of the decoder's attention.

vLLM caches no prefixes of such models. A request's blocks for cross attention hold its encoder's states. The call that
schedules the encoder takes as many as the encoder's tokens need, and they stay until the request ends.
"""

from copy import copy
from typing import Any

from vllm.v1.kv_cache_interface import CrossAttentionSpec

from kvblocks import BlockHold, Sequence
from kvblocks.integrations.vllm.cache_manager import KVBlocksCacheManager
from kvblocks.integrations.vllm.groups import event_kinds
from kvblocks.integrations.vllm.probe import refuse
from kvblocks.integrations.vllm.views import GivenBlocks, NoBlocks, TablesView


def is_cross_attention(group: Any) -> bool:
    """Whether a group of a KV cache configuration is for cross attention."""
    return isinstance(group.kv_cache_spec, CrossAttentionSpec)


class EncoderDecoderManager(KVBlocksCacheManager):
    """A manager of two groups: the decoder's own attention, and cross attention.

    kvblocks' manager has only the first group. A second sequence of each request has the blocks for cross attention.
    """

    def __init__(self, kv_cache_config: Any, *args: Any, **what: Any) -> None:
        groups = kv_cache_config.kv_cache_groups
        crossed = [number for number, group in enumerate(groups) if is_cross_attention(group)]
        if what.get("enable_caching", True) or len(groups) != 2 or len(crossed) != 1:
            raise refuse(
                f"CrossAttentionSpec in KV cache group {crossed[0]}",
                "beside one other group, and without prefix caching, it is served",
            )
        decoder = copy(kv_cache_config)
        decoder.kv_cache_groups = [group for group in groups if not is_cross_attention(group)]
        super().__init__(decoder, *args, **what)
        self._cross = crossed[0]
        self._cross_block_size: int = groups[self._cross].kv_cache_spec.block_size
        self._encoders: dict[str, Sequence] = {}  # by request id
        self.kv_cache_config = kv_cache_config
        self.kv_cache_event_metadata = event_kinds(kv_cache_config)
        self.num_kv_cache_groups = len(groups)
        self.empty_kv_cache_blocks = NoBlocks(len(groups))
        own = self.coordinator.single_type_managers[0]
        cross = copy(own)
        cross.block_size, cross.kv_cache_spec = self._cross_block_size, groups[self._cross].kv_cache_spec
        cross.req_to_blocks = TablesView(self._encoders, 0)
        own.kv_cache_group_id, cross.kv_cache_group_id = 1 - self._cross, self._cross
        self.coordinator.single_type_managers = (cross, own) if self._cross == 0 else (own, cross)

    def allocate_slots(
        self, request: Any, num_new_tokens: int, *args: Any, num_encoder_tokens: int = 0, **what: Any
    ) -> GivenBlocks | None:
        """As in KVBlocksCacheManager, and also make room for the encoder's states. Without room, nothing changes."""
        table: list[Any] = []
        is_start = num_encoder_tokens > 0 and request.request_id not in self._encoders
        if is_start:
            encoder = Sequence(("encoder", request.request_id), [0])
            num_slots = -(-num_encoder_tokens // self._cross_block_size) * self._block_size
            if self.manager.allocate_slots(encoder, 1, num_total_tokens=num_slots) is None:
                return None
            self._encoders[request.request_id] = encoder
            table = encoder.group_blocks(0)
        given = super().allocate_slots(request, num_new_tokens, *args, **what)
        if given is None:
            if is_start:
                self.manager.free(self._encoders.pop(request.request_id))
            return None
        if self._zeroed:
            self._new_block_ids += [block.block_id for block in table]
        own = () if given is self.empty_kv_cache_blocks else given.tables[0]
        return self._both(own, table) if own or table else self.empty_kv_cache_blocks

    def _both(self, own: Any, cross: Any) -> GivenBlocks:
        return GivenBlocks((cross, own) if self._cross == 0 else (own, cross))

    def free(self, request: Any) -> None:
        """Give all blocks of a request back."""
        super().free(request)
        encoder = self._encoders.pop(request.request_id, None)
        if encoder is not None:
            self.manager.free(encoder)

    def pop_blocks_for_free(self, request: Any) -> list[BlockHold]:
        """Free a request whose blocks a step in flight may still use.

        Returns an argument for `block_pool.free_blocks`.
        """
        holds = super().pop_blocks_for_free(request)
        encoder = self._encoders.pop(request.request_id, None)
        return holds if encoder is None else [*holds, self.manager.holds.detach(encoder)]

    def get_blocks(self, request_id: str) -> GivenBlocks:
        """Return all blocks of a request."""
        sequence, encoder = self._sequences.get(request_id), self._encoders.get(request_id)
        own = sequence.group_blocks(0) if sequence is not None and sequence.is_allocated else ()
        return self._both(own, () if encoder is None else encoder.group_blocks(0))

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        """Return the ids of the blocks that hold a request's first tokens, and of those of its encoder's states."""
        ids = self.get_block_ids(request_id)
        most = [-(-num_computed_tokens // self._block_size)] * 2
        most[self._cross] = len(ids[self._cross])
        return tuple(table[:number] for table, number in zip(ids, most, strict=True))

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:  # noqa: ARG002
        """Return 0 for each group: nothing is shared."""
        return [0] * self.num_kv_cache_groups


def manager_class(kv_cache_config: Any) -> type[KVBlocksCacheManager]:
    """Return the manager class for a KV cache configuration."""
    has_encoder = any(is_cross_attention(group) for group in kv_cache_config.kv_cache_groups)
    return EncoderDecoderManager if has_encoder else KVBlocksCacheManager
