"""A worker that keeps tokens where a real one keeps their keys and values.

It knows no more than a real worker: what SchedulerOutput says. It writes what a step computes and reads what attention
would read, so it notices a block that two requests write, and a hit on tokens that nobody has computed.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from bench.vllm.schedulers import Settings
from integrations.vllm.workload import make_drafts, num_accepted
from kvblocks.verify import Contexts

Tables = list[list[int]]


class WrongReadError(AssertionError):
    """Attention would have read something else than the request's own tokens."""


class Chain:
    """What a request's slots must hold: a number for each token.

    It depends on all tokens up to there, the salt, and the images or embeddings of these tokens.
    """

    def __init__(self, request: Request, contexts: Contexts) -> None:
        self.request = request
        self.contexts = contexts
        self.values: list[int] = []
        self.root = contexts.root(request.cache_salt)

    def values_up_to(self, drafts: list[int]) -> list[int]:
        """Return the numbers of the known tokens, and of `drafts` behind them."""
        if self.request.resumable:  # each turn may change the last tokens
            self.values.clear()
        tokens = self.request.all_token_ids
        if self.request.mm_features or self.request.prompt_embeds is not None:
            tokens = inputs(self.request)
        self._extend(self.values, tokens[len(self.values) :])
        grown = list(self.values)
        self._extend(grown, drafts)
        return grown

    def _extend(self, values: list[int], tokens: Any) -> None:
        values += self.contexts.chain(values[-1] if values else self.root, tokens)


def inputs(request: Request) -> list[Any]:
    """Return what a model sees at each token: its id, its part of an image, or its embedding."""
    found: list[Any] = list(request.all_token_ids)
    for feature in request.mm_features:
        start, length = feature.mm_position.offset, feature.mm_position.length
        found[start : start + length] = [(feature.identifier, part) for part in range(length)]
    if request.prompt_embeds is not None:
        is_token = request.prompt_is_token_ids or [False] * len(request.prompt_embeds)
        for position, row in enumerate(request.prompt_embeds.tolist()):
            found[position] = found[position] if is_token[position] else tuple(row)
    return found


class Worker:
    """The block tables and the memory of a worker, for the groups of layers that `settings` say.

    All groups lie in the same memory, and what a token's slot holds depends on the group. A block of recurrent layers
    holds the state behind a request's last computed token, and a ring buffer what that token left there.
    """

    def __init__(self, settings: Settings) -> None:
        self.block_size = settings.block_size
        self.num_drafts = settings.num_drafts
        self.windows: tuple[int | None, ...] = (None, *settings.windows)
        self.chunks = settings.chunks
        self.num_attending = len(self.windows) + len(self.chunks)
        self.num_groups = self.num_attending + settings.has_ring + settings.num_states
        self.state_size = settings.block_size if settings.has_caching else settings.max_model_len
        self.ring = self.num_attending if settings.has_ring else None
        self._tables: dict[str, Tables] = {}
        self._rings: set[str] = set()  # the requests that have written to their ring buffer
        self._contexts = Contexts()
        self._chains: dict[str, Chain] = {}
        self._memory: dict[int, list[Any]] = {}

    def take_tables(self, output: SchedulerOutput) -> dict[str, Tables]:
        """Return the tables of a step's requests, a list a group, which a later step does not shorten."""
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(block_ids) for block_ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = [[] for _ in range(self.num_groups)]
                self._rings.discard(request_id)
            for table, more in zip(self._tables[request_id], block_ids or (), strict=False):
                table.extend(more)
        return {request_id: self._tables[request_id] for request_id in output.num_scheduled_tokens}

    def execute(self, step: Any, requests: dict[str, Request]) -> dict[str, int]:
        """Compute a step, and return how many drafts of every request are right. Raises WrongReadError."""
        work = []
        moved: list[tuple[int, Any]] = []
        accepted = {}
        for request_id, num_tokens in step.output.num_scheduled_tokens.items():
            request = requests[request_id]
            num_drafts = len(step.output.scheduled_spec_decode_tokens.get(request_id, ()))
            drafts = make_drafts(request.all_token_ids, self.num_drafts)[:num_drafts] if num_drafts else []
            chain = self._chains.setdefault(request_id, Chain(request, self._contexts)).values_up_to(drafts)
            if request_id in step.sampling:
                end = len(chain)
                accepted[request_id] = min(num_accepted(request.all_token_ids, self.num_drafts), num_drafts)
            else:
                end = step.starts[request_id] + num_tokens
            for group, table in enumerate(step.tables[request_id]):
                if group < self.num_attending:
                    work.append((request_id, group, table, chain, end - num_tokens, end))
                elif group == self.ring:
                    self._turn(request_id, table)
                else:
                    self._move_on(moved, request_id, table, chain, end - num_tokens, end)
        for _, *what in work:
            self._write(*what)
        if len(dict(moved)) < len(moved) or 0 in dict(moved):
            raise WrongReadError(f"a block gets two states, or none gets one: {[block_id for block_id, _ in moved]}")
        self._memory |= dict(moved)
        for request_id, *what in work:
            self._read(request_id, *what)
        return accepted

    def _move_on(
        self, moved: list[Any], request_id: str, table: list[int], chain: list[int], start: int, end: int
    ) -> None:
        """Take a recurrent state from one token to another, and from the block behind `start` to the one behind `end`.

        Without caching the table has one block.
        """
        size = self.state_size
        source, target = table[max(0, start - 1) // size], table[(end - 1) // size]
        if start and self._memory.get(source) != [("state", start, chain[start - 1])]:
            raise WrongReadError(f"{request_id}: block {source} does not hold the state behind {start} tokens")
        moved.append((target, [("state", end, chain[end - 1])]))

    def _turn(self, request_id: str, table: list[int]) -> None:
        """Write to a request's ring buffer, in the one block of its table."""
        (block_id,) = table
        if request_id in self._rings and self._memory[block_id] != [("ring", request_id)]:
            raise WrongReadError(f"{request_id}: another one wrote to its ring buffer, block {block_id}")
        self._rings.add(request_id)
        self._memory[block_id] = [("ring", request_id)]

    def load(self, request: Request, table: list[int], num_tokens: int) -> None:
        """Write a request's first tokens into the blocks of a table, as a connector does, in group 0."""
        self._write(0, table, Chain(request, self._contexts).values_up_to([]), 0, num_tokens)

    def spoil(self, block_ids: Iterable[int]) -> None:
        """Leave garbage in blocks."""
        self._memory.update({block_id: ["garbage"] * (self.block_size + 1) for block_id in block_ids})

    def _write(self, group: int, table: list[int], chain: list[int], start: int, end: int) -> None:
        for number, first, last in self._spans(start, end):
            block = self._memory.get(table[number], [])
            if len(block) <= self.block_size:  # nothing, or a state
                block = self._memory[table[number]] = [None] * (self.block_size + 1)
            offset = number * self.block_size
            block[first - offset : last - offset] = chain[first:last]
            block[self.block_size] = group

    def _read(self, request_id: str, group: int, table: list[int], chain: list[int], start: int, end: int) -> None:
        if group < len(self.windows):
            window = self.windows[group]
            lowest = 0 if window is None else max(0, start - window + 1)
        else:
            lowest = start - start % self.chunks[group - len(self.windows)]
        for number, first, last in self._spans(lowest, end):
            block = self._memory.get(table[number])
            offset = number * self.block_size
            if block is None or block[first - offset : last - offset] != chain[first:last] or block[-1] != group:
                raise WrongReadError(
                    f"{request_id}: block {table[number]} of group {group} does not hold tokens {first} to {last}"
                )

    def _spans(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        size = self.block_size
        for number in range(start // size, -(-end // size)):
            yield number, max(start, number * size), min(end, (number + 1) * size)
