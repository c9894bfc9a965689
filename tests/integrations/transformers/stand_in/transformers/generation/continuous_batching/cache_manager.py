"""Allocators of groups; kvblocks has its own in their place."""


class FullAttentionCacheAllocator:
    def __init__(self, index, block_size):
        self._index, self.block_size = index, block_size

    def get_read_indices(self, request_id, past_length, query_length):
        raise NotImplementedError

    def get_write_indices(self, request_id, past_length, query_length):
        raise NotImplementedError

    def fill_block_table(self, request_id, past_length, query_length, block_table):
        raise NotImplementedError


class SlidingAttentionCacheAllocator(FullAttentionCacheAllocator):
    def __init__(self, index, block_size, sliding_window, sentinel_index):
        super().__init__(index, block_size)
        self.sliding_window, self.sentinel_index = sliding_window, sentinel_index
