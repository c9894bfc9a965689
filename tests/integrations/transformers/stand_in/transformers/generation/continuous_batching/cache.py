"""The cache: groups of layers, and the one tensor, a list of rows."""

from .cache_manager import FullAttentionCacheAllocator, SlidingAttentionCacheAllocator


class Rows:
    """The tensor."""

    def __init__(self, number):
        self.rows = [None] * number

    def index_copy_(self, index, rows):
        for place, row in zip(index, rows, strict=True):
            self.rows[place] = row

    def index_select(self, index):
        return [self.rows[place] for place in index]


class PagedAttentionCache:
    def __init__(self, config, continuous_batching_config, device, distributed_helper, tp_plan, dtype=None):
        self.config, self.device, self.dtype = config, device, dtype
        self.block_size = continuous_batching_config.block_size
        self.num_blocks, self.max_batch_tokens = (
            continuous_batching_config.num_blocks,
            continuous_batching_config.max_batch_tokens,
        )
        self.max_blocks_per_request = continuous_batching_config.max_blocks_per_request
        self.allow_block_sharing = continuous_batching_config.allow_block_sharing
        self.use_prefix_sharing = self.allow_block_sharing and config.windows == [None]
        self.sentinel_index = self.num_blocks * self.block_size + 1
        self.group_cache_managers = [
            FullAttentionCacheAllocator(i, self.block_size)
            if window is None
            else SlidingAttentionCacheAllocator(i, self.block_size, window, self.sentinel_index)
            for i, window in enumerate(config.windows)
        ]
        self.rows = Rows((self.num_blocks + 2) * self.block_size)

    def allocate_blocks(self, n_blocks, request_id, allocated_blocks):
        raise NotImplementedError

    def free_blocks(self, request_id):
        raise NotImplementedError

    def free_all_requests(self):
        raise NotImplementedError

    def get_num_free_blocks(self):
        raise NotImplementedError

    def blocks_in_use(self, request_id):
        raise NotImplementedError

    def search_prefix_match(self, request_id, prompt_ids):
        raise NotImplementedError

    def mark_shareable_blocks_as_complete(self, state, num_complete_blocks):
        raise NotImplementedError

    def compute_max_num_forks(self, source_request_id):
        raise NotImplementedError

    def fork_request(self, source_request_id, destination_request_ids):
        raise NotImplementedError

    def get_seqlens_k(self, past_length, query_length):
        raise NotImplementedError

    def extend_read_and_write_indices(self, request_id, past_length, query_length, read_index, write_index):
        for cm, reads, writes in zip(self.group_cache_managers, read_index, write_index, strict=True):
            reads.extend(cm.get_read_indices(request_id, past_length, query_length))
            writes.extend(cm.get_write_indices(request_id, past_length, query_length))

    def fill_block_table(self, request_id, past_length, query_length, block_table):
        for i, cm in enumerate(self.group_cache_managers):
            cm.fill_block_table(request_id, past_length, query_length, block_table[i])

    def update(self, key_states, value_states, layer_idx, read_index, write_index):
        """One group's layers write and read `key_states`, a list of rows."""
        sliding_window = getattr(self.group_cache_managers[layer_idx], "sliding_window", 1)
        if sliding_window == 1:
            self.rows.index_copy_(write_index[layer_idx], key_states)
            found = self.rows.index_select(read_index[layer_idx])
        else:
            new = iter(key_states)
            found = self.rows.index_select(read_index[layer_idx])
            places = zip(read_index[layer_idx], found, strict=True)
            found = [next(new) if index == self.sentinel_index else row for index, row in places]
            self.rows.index_copy_(write_index[layer_idx], key_states)
        return found

    def copy_cache(self, list_source_blocks, list_forked_blocks):
        for source, destination in zip(list_source_blocks, list_forked_blocks, strict=True):
            old, new = (
                range(block * self.block_size, (block + 1) * self.block_size) for block in (source, destination)
            )
            self.rows.index_copy_(new, self.rows.index_select(old))
