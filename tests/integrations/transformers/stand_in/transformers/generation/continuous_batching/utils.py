"""Requests that warm up."""

from .requests import RequestState


def create_warmup_future_states(cache, request_id, num_tokens):
    state = RequestState(request_id, [0] * num_tokens)
    return state if cache.allocate_blocks(-(-num_tokens // cache.block_size), request_id, 0) is not None else None
