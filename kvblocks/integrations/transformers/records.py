"""What is kept of a request: its sequence, and how much of it the steps that ended have written."""

from typing import Any

from kvblocks import KVCacheManager, Sequence


class Record:
    """A request that has blocks.

    sequence: its tokens and block tables. state: transformers' RequestState, None until it is first given slots: a hit
    and a fork come before that. num_written: the tokens whose keys and values the steps that ended have written.
    """

    __slots__ = ("num_written", "sequence", "state")

    def __init__(self, sequence: Sequence, state: Any, num_written: int) -> None:
        self.sequence = sequence
        self.state = state
        self.num_written = num_written


Records = dict[str, Record]
"""The requests that have blocks, by transformers' request id."""


def count_needed_blocks(manager: KVCacheManager, records: Records, request_id: str, total: int) -> int:
    """Return how many free blocks, of all groups together, a request's first `total` tokens take."""
    record = records.get(request_id)
    if record is None:
        return sum(group.num_blocks(total, total) for group in manager.groups)
    return manager.get_num_blocks_to_allocate(record.sequence, total)


def known_tokens(state: Any, start: int, end: int) -> list[int]:
    """Return tokens `start` to `end` of a request, or as many of them as are known."""
    prompt: list[int] = state.initial_tokens
    num_prompt = len(prompt)
    if start >= num_prompt:  # decoding: without a copy of the prompt
        generated: list[int] = state.generated_tokens
        return generated[start - num_prompt : end - num_prompt]
    known: list[int] = prompt + state.generated_tokens
    return known[start:end]
