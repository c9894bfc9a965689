"""Requests, and what is noted of them for a step."""

from dataclasses import dataclass, field
from enum import IntEnum


class RequestStatus(IntEnum):
    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3


@dataclass
class RequestState:
    request_id: str
    initial_tokens: list
    max_new_tokens: int = 8
    num_children: int = 0
    generated_tokens: list = field(default_factory=list)
    tokens_to_process: list = field(default_factory=list)
    remaining_prefill_tokens: list = field(default_factory=list)
    position_offset: int = 0
    allocated_blocks: int = 0
    status: RequestStatus = RequestStatus.PENDING

    def __post_init__(self):
        self.remaining_prefill_tokens = list(self.initial_tokens)

    def current_len(self):
        return self.position_offset


class FutureRequestState:
    __slots__ = ("complete_blocks", "has_new_token", "query_length", "state")

    def __init__(self, state, has_new_token, complete_blocks, query_length):
        self.state, self.has_new_token = state, has_new_token
        self.complete_blocks, self.query_length = complete_blocks, query_length
