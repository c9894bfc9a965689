"""A worker that keeps tokens where a real one keeps their keys and values.

It knows no more than a real worker: what SchedulerOutput says. It writes what a step computes and reads what attention
would read, so it notices a block that two requests write, and a hit on tokens that nobody has computed.
"""

from collections.abc import Iterator
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from integrations.vllm.workload import make_drafts, num_accepted


class WrongReadError(AssertionError):
    """Attention would have read something else than the request's own tokens."""


class Chain:
    """What a request's slots must hold: for every token a number that depends on all tokens up to it, and the salt."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.values: list[int] = []
        self.seed = hash(str(request.cache_salt))

    def values_up_to(self, drafts: list[int]) -> list[int]:
        """Return the numbers of the known tokens, and of `drafts` behind them."""
        tokens = self.request.all_token_ids
        self._extend(self.values, tokens[len(self.values) :])
        grown = list(self.values)
        self._extend(grown, drafts)
        return grown

    def _extend(self, values: list[int], tokens: Any) -> None:
        value = values[-1] if values else self.seed
        for token in tokens:
            value = hash((value, token))
            values.append(value)


class Worker:
    """The block tables and the memory of a worker with one group of layers."""

    def __init__(self, block_size: int, num_drafts: int) -> None:
        self.block_size = block_size
        self.num_drafts = num_drafts
        self._tables: dict[str, list[int]] = {}
        self._chains: dict[str, Chain] = {}
        self._memory: dict[int, list[int | None]] = {}

    def take_tables(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Return the tables of a step's requests, which a later step does not shorten."""
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = []
            if block_ids is not None:
                self._tables[request_id] += block_ids[0]
        return {request_id: self._tables[request_id] for request_id in output.num_scheduled_tokens}

    def execute(self, step: Any, requests: dict[str, Request]) -> dict[str, int]:
        """Compute a step, and return how many drafts of every request are right. Raises WrongReadError."""
        ends = {}
        accepted = {}
        chains = {}
        for request_id, num_tokens in step.output.num_scheduled_tokens.items():
            request = requests[request_id]
            num_drafts = len(step.output.scheduled_spec_decode_tokens.get(request_id, ()))
            drafts = make_drafts(request.all_token_ids, self.num_drafts)[:num_drafts] if num_drafts else []
            chain = self._chains.setdefault(request_id, Chain(request)).values_up_to(drafts)
            if request_id in step.sampling:
                end = len(chain)
                accepted[request_id] = min(num_accepted(request.all_token_ids, self.num_drafts), num_drafts)
            else:
                end = step.starts[request_id] + num_tokens
            chains[request_id] = chain
            ends[request_id] = end
            self._write(step.tables[request_id], chain, end - num_tokens, end)
        for request_id, chain in chains.items():
            self._read(request_id, step.tables[request_id], chain, ends[request_id])
        return accepted

    def _write(self, table: list[int], chain: list[int], start: int, end: int) -> None:
        for number, first, last in self._spans(start, end):
            block = self._memory.setdefault(table[number], [None] * self.block_size)
            offset = number * self.block_size
            block[first - offset : last - offset] = chain[first:last]

    def _read(self, request_id: str, table: list[int], chain: list[int], end: int) -> None:
        for number, first, last in self._spans(0, end):
            block = self._memory.get(table[number])
            if block is None or block[: last - first] != chain[first:last]:
                raise WrongReadError(f"{request_id}: block {table[number]} does not hold its tokens {first} to {last}")

    def _spans(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        size = self.block_size
        for number in range(start // size, -(-end // size)):
            yield number, max(start, number * size), min(end, (number + 1) * size)
