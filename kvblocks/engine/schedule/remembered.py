"""The next tokens of whole prompts, so that the same prompt again gets its first token without a forward pass.

Only requests with a `prompt_key` take part: those whose first token depends only on their prompt, as with greedy
sampling. When a step has computed such a prompt, the sequence is forked, and the fork is kept together with the token.
This keeps the KV of the whole prompt, including its partly filled last block.

- A waiting request gets the token wherever it is in the queue, since this takes no block. It keeps its turn, and until
  then it is like a preempted request: it has a token that isn't computed yet.
- If the cache has less than the whole prompt when its turn comes, the request gets the fork's blocks by forking it
  again. The last block is copied when the request writes to it.

A fork owns blocks, but no request may lack blocks because of it. So forks are given up, the least recently used first,
before a request is refused a block, is preempted or has to wait, and before a pin gives way. Together they hold at most
a share of the pool, and those of a salt at most its quota. A block that several forks share counts once. A fork can't
be used after a reset, after its salt was forgotten, or when it has lost KV (`Sequence.lost_from`). Such forks are
dropped before the next answer.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import suppress

from kvblocks import CacheHit, KVCacheManager, Sequence, TierHit
from kvblocks.arguments import check_count
from kvblocks.engine.schedule.capacity import blocks_of
from kvblocks.engine.schedule.request import PromptKey, Request
from kvblocks.errors import CorruptStateError
from kvblocks.hashing import PositionKey

MAX_PROMPTS = 256


def prompt_key(sequence: Sequence) -> PromptKey:
    """Return all that a sequence's KV depends on: its tokens and keys. O(tokens)."""
    keys: tuple[PositionKey, ...] = sequence.extra_keys
    return bytes(sequence.packed_tokens()), sequence.salt, sequence.lora, keys


class _Prompt:
    """A remembered prompt. fork: its sequence, to which nothing is ever added. block_ids: the fork's blocks."""

    __slots__ = ("block_ids", "fork", "token_id")

    def __init__(self, fork: Sequence, token_id: int, block_ids: frozenset[int]) -> None:
        self.fork = fork
        self.token_id = token_id
        self.block_ids = block_ids

    @property
    def is_valid(self) -> bool:
        """Whether an equal prompt may still read its blocks. O(1)."""
        return _is_valid(self.fork)


class RememberedPrompts:
    """At most `max_prompts` prompts with their next tokens. Their forks hold at most `max_blocks` blocks of a manager.

    Attribute: num_answers, how many first tokens it has given. Raises InvalidArgumentError.
    """

    def __init__(self, manager: KVCacheManager, max_blocks: int, max_prompts: int = MAX_PROMPTS) -> None:
        self.manager = manager
        self.max_blocks = check_count("max_blocks", max_blocks, 0)
        self.max_prompts = check_count("max_prompts", max_prompts, 0)
        self.num_answers = 0
        self._prompts: OrderedDict[PromptKey, _Prompt] = OrderedDict()  # least recently used first
        self._holds: dict[str | None, Counter[int]] = {}  # salt -> block id -> how many forks hold the block
        self._number = 0  # of the last fork, in its id

    def __len__(self) -> int:
        """How many prompts it has. O(1)."""
        return len(self._prompts)

    @property
    def num_blocks(self) -> int:
        """The number of blocks that forks hold; shared ones count once. O(salts)."""
        return sum([len(held) for held in list(self._holds.values())])  # copied: a scrape may come from another thread

    def note(self, request: Request, token_id: int) -> None:
        """Keep a prompt that a step has computed, with its next token. Call it before the sequence has that token.

        Does nothing if the request has no key, has already generated tokens, has blocks from before a reset, or holds
        more blocks than there is room for. O(tokens + blocks).
        """
        key, sequence = request.prompt_key, request.sequence
        if key is None or request.num_output_tokens or key in self._prompts or not _is_valid(sequence):
            return
        block_ids = frozenset([block.block_id for block in blocks_of(self.manager, sequence)])
        most = self._room_of(sequence.salt)
        if len(block_ids) > most or not self.max_prompts:
            return
        self._number += 1
        fork = self.manager.fork(sequence, ("remembered", self._number))
        self._prompts[key] = _Prompt(fork, token_id, block_ids)
        self._holds.setdefault(sequence.salt, Counter()).update(block_ids)
        self._keep_quota(sequence.salt)  # the new prompt is the last to be dropped, and fits
        while self.num_blocks > self.max_blocks or len(self._prompts) > self.max_prompts:
            self.give_up()

    def answer(self, waiting: Iterable[Request]) -> Iterator[tuple[Request, int]]:
        """Yield the waiting requests whose first token is known, with that token. The caller gives it to them.

        Each is looked up when the iterator reaches it. O(waiting requests + remembered prompts).
        """
        self.drop_stale()
        for request in tuple(waiting) if len(self) else ():
            token_id = self.take_token(request)
            if token_id is not None:
                if not request.num_computed_tokens:
                    request.num_cached_tokens = request.sequence.num_prompt_tokens
                yield request, token_id

    def take_token(self, request: Request) -> int | None:
        """Return the first token of a request that has none yet, and count the answer; None if it isn't known.

        Makes the prompt the most recently used one. O(prompt) if the token is known, else O(1).
        """
        key = request.prompt_key
        if key is None or key not in self._prompts or request.num_output_tokens:
            return None
        self._prompts.move_to_end(key)
        self.num_answers += 1
        return self._prompts[key].token_id

    def fork(self, request: Request, num_cached_tokens: int) -> Sequence | None:
        """Return a sequence with the tokens of a request, which has its first one, and the KV of its whole prompt.

        num_cached_tokens: how many tokens of the prompt are cached. Returns None if all are, or if the prompt isn't
        remembered. The sequence has the request's id, which no other sequence with blocks may have. O(tokens + blocks).
        """
        key, own = request.prompt_key, request.sequence
        is_better = num_cached_tokens < own.num_prompt_tokens and request.num_output_tokens
        if key is None or key not in self._prompts or not self._prompts[key].is_valid or not is_better:
            return None
        self._prompts.move_to_end(key)
        child = self.manager.fork(self._prompts[key].fork, own.sequence_id)
        child.session = own.session
        child.append_tokens(own.token_ids(own.num_prompt_tokens))
        return child

    def give_up(self) -> bool:
        """Drop the least recently used prompt. Its blocks become free unless other sequences have them.

        Returns whether there was a prompt. O(blocks).
        """
        if not self._prompts:
            return False
        self._drop(next(iter(self._prompts)))
        return True

    def drop_stale(self) -> None:
        """Drop the prompts that may no longer be used, after a reset, a loss of KV or a forgotten salt. O(prompts).

        Also drops prompts of salts whose quota has shrunk.
        """
        for key in [key for key, prompt in self._prompts.items() if not prompt.is_valid]:
            self._drop(key)
        for salt in list(self._holds):
            self._keep_quota(salt)

    def clear(self) -> None:
        """Drop all prompts. Does nothing if the manager was interrupted and refuses all calls. O(blocks)."""
        with suppress(CorruptStateError):
            while self.give_up():
                pass

    def recover(self) -> None:
        """Drop all prompts, and any fork that wasn't kept yet, after a call was interrupted at any point. O(blocks)."""
        last = self.manager.sequence(("remembered", self._number))
        forks = [prompt.fork for prompt in self._prompts.values()]
        for fork in forks if last is None or last in forks else [*forks, last]:
            if fork.is_allocated:
                self.manager.free(fork)
        self._prompts.clear()
        self._holds.clear()

    def check(self) -> None:
        """Raise AssertionError unless the state is consistent. O(blocks)."""
        assert len(self._prompts) <= self.max_prompts, f"remembered: {len(self._prompts)} prompts"
        assert self.num_blocks <= self.max_blocks, f"remembered: {self.num_blocks} blocks of {self.max_blocks}"
        holds: dict[str | None, Counter[int]] = {}
        for key, prompt in self._prompts.items():
            fork = prompt.fork
            assert fork.is_allocated and prompt_key(fork) == key, f"remembered: {fork} for another prompt"
            assert prompt.block_ids == {block.block_id for block in blocks_of(self.manager, fork)}, (
                f"{fork}: its blocks"
            )
            holds.setdefault(fork.salt, Counter()).update(prompt.block_ids)
        assert holds == self._holds, "remembered: blocks that are counted otherwise than held"

    def _drop(self, key: PromptKey) -> None:
        prompt = self._prompts[key]
        if prompt.fork.is_allocated:
            self.manager.free(prompt.fork)
        del self._prompts[key]
        held = self._holds[prompt.fork.salt]
        held.subtract(prompt.block_ids)
        for block_id in prompt.block_ids:
            if not held[block_id]:
                del held[block_id]
        if not held:
            del self._holds[prompt.fork.salt]

    def _keep_quota(self, salt: str | None) -> None:
        """Drop the least recently used prompts of a salt until its forks hold no more than they may."""
        most = self._room_of(salt)
        while len(self._holds.get(salt, ())) > most:
            self._drop(next(key for key, prompt in self._prompts.items() if prompt.fork.salt == salt))

    def _room_of(self, salt: str | None) -> int:
        """How many blocks the forks of a salt may hold. O(1)."""
        quota = self.manager.quotas.of(salt)
        return self.max_blocks if quota is None else min(self.max_blocks, quota)


def make_room(
    manager: KVCacheManager,
    remembered: RememberedPrompts | None,
    sequence: Sequence,
    num_tokens: int,
    hit: CacheHit | None = None,
    loads: Items[TierHit] = (),
) -> bool:
    """Allocate slots as `KVCacheManager.allocate_slots` does, giving up remembered prompts if there is no room.

    They are given up before pins. Returns whether there was room. Errors and cost are those of that call.
    """
    if remembered is not None and manager.pins:
        start = sequence.num_computed_tokens if hit is None else hit.num_tokens
        end = start + sum([load.num_tokens for load in loads]) + num_tokens
        while manager.get_num_blocks_to_allocate(sequence, end, hit=hit) > manager.num_free_blocks:
            if not remembered.give_up():
                break
    while True:
        if loads:
            blocks = manager.tiers.allocate(sequence, hit, loads, num_tokens)
        else:
            blocks = manager.allocate_slots(sequence, num_tokens, hit=hit)
        if blocks is not None or remembered is None or not remembered.give_up():
            return blocks is not None


def _is_valid(sequence: Sequence) -> bool:
    """Whether a sequence is of the present epoch, and has lost no KV. O(1)."""
    return sequence.epoch is not None and sequence.epoch.is_current and sequence.lost_from is None
