"""What is kept about a request: its sequence, and how many of its tokens have been written by completed steps."""

from typing import Any

from kvblocks import KVCacheManager, Sequence


class Record:
    """A request that has blocks.

    sequence: its tokens and block tables. state: transformers' RequestState; None until it first gets slots, which is
    after hits and forks. num_written: the tokens whose keys and values completed steps have written.
    """

    __slots__ = ("num_written", "sequence", "state")

    def __init__(self, sequence: Sequence, state: Any, num_written: int) -> None:
        self.sequence = sequence
        self.state = state
        self.num_written = num_written


Records = dict[str, Record]
"""The requests that have blocks, by transformers' request id."""


def count_needed_blocks(manager: KVCacheManager, records: Records, request_id: str, total: int) -> int:
    """Return how many free blocks, in all groups together, a request's first `total` tokens take."""
    record = records.get(request_id)
    if record is None:
        return sum(group.num_blocks(total, total) for group in manager.groups)
    return manager.get_num_blocks_to_allocate(record.sequence, total)


def known_tokens(state: Any, start: int, end: int) -> list[int]:
    """Return tokens `start` to `end` of a request, as far as they are known."""
    prompt: list[int] = state.initial_tokens
    num_prompt = len(prompt)
    if start >= num_prompt:  # decoding: no copy of the prompt is needed
        generated: list[int] = state.generated_tokens
        return generated[start - num_prompt : end - num_prompt]
    known: list[int] = prompt + state.generated_tokens
    return known[start:end]
