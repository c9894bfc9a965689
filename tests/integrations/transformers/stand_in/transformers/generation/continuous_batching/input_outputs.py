"""What a step writes and reads."""


def compute(cache, windows, batch):
    """Let all groups write and read, and see that each request reads its own tokens. Returns the tokens computed."""
    reads, writes, new, expected = ([[] for _ in windows] for _ in range(4))
    for future in batch:
        state, start = future.state, future.state.position_offset
        end = start + future.query_length
        cache.extend_read_and_write_indices(state.request_id, start, future.query_length, reads, writes)
        tokens = (state.initial_tokens + state.generated_tokens)[:end]
        for group, window in enumerate(windows):
            rows = [(group, position, token) for position, token in enumerate(tokens)]
            new[group] += rows[start:]
            expected[group] += rows[0 if window is None else max(0, start - window + 1) :]
        state.position_offset = end
    for group, _ in enumerate(windows):
        assert cache.update(new[group], new[group], group, reads, writes) == expected[group]
    return sum(future.query_length for future in batch)
