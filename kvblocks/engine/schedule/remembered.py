"""The next tokens of whole prompts, so that the same prompt again gets its first token without a forward pass.

Only requests with a `prompt_key` take part: those whose first token depends on nothing but their prompt, as the most
likely one does. When a step has computed such a prompt, the sequence is forked, and the fork is kept with the token
that came of it. So the KV of the whole prompt stays, that of its unfilled last block too.

- The token is given to a request that waits, wherever it stands in the queue: that takes no block from anybody. Its
  turn comes as before. Until then it is what a preempted request is, one with a token that isn't computed yet.
- When its turn comes and the cache has less of the prompt than all, it gets the blocks of the fork, as another fork;
  the last block is copied when the request writes to it.

A fork owns blocks, so it must not be in anybody's way. Forks are given up, least recently used first, before a request
is refused a block, and so before any is preempted or waits, and before a pin gives way. They hold a part of the pool at
most, and those of a salt no more than its quota; a block that several of them share counts once. A fork that is of
before a reset, or of a salt that was forgotten since, or whose last full block is cached no more, is of no use, and
goes before the next answer.
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import suppress
from itertools import count

from kvblocks.arguments import check_count
from kvblocks.core.hashing import PositionKey
from kvblocks.core.hit import CacheHit
from kvblocks.core.sequence import Sequence
from kvblocks.engine.schedule.capacity import blocks_of
from kvblocks.engine.schedule.request import PromptKey, Request
from kvblocks.errors import CorruptStateError
from kvblocks.manager import KVCacheManager
from kvblocks.tiers.transfer import TierHit

MAX_PROMPTS = 256


def prompt_key(sequence: Sequence) -> PromptKey:
    """Return all that the KV of a sequence depends on: tokens and keys. O(tokens)."""
    keys: tuple[PositionKey, ...] = sequence.extra_keys
    return bytes(sequence.packed_tokens()), sequence.salt, sequence.lora, keys


class _Prompt:
    """What is kept of a prompt. fork: its sequence, which nothing is ever added to. block_ids: those that it holds."""

    __slots__ = ("block_ids", "fork", "token_id")

    def __init__(self, fork: Sequence, token_id: int, block_ids: frozenset[int]) -> None:
        self.fork = fork
        self.token_id = token_id
        self.block_ids = block_ids

    @property
    def is_valid(self) -> bool:
        """Whether what it holds is still what a prompt like it may read. O(1)."""
        return _is_cached(self.fork)


class RememberedPrompts:
    """At most `max_prompts` prompts with their next tokens, whose forks hold at most `max_blocks` blocks of a manager.

    num_answers: how many first tokens it gave. Raises InvalidArgumentError.
    """

    def __init__(self, manager: KVCacheManager, max_blocks: int, max_prompts: int = MAX_PROMPTS) -> None:
        self.manager = manager
        self.max_blocks = check_count("max_blocks", max_blocks, 0)
        self.max_prompts = check_count("max_prompts", max_prompts, 0)
        self.num_answers = 0
        self._prompts: dict[PromptKey, _Prompt] = {}  # least recently used first
        self._holds: dict[str | None, Counter[int]] = {}  # by salt: by block id, how many forks hold it
        self._numbers: Iterator[int] = count()

    def __len__(self) -> int:
        """How many prompts it has. O(1)."""
        return len(self._prompts)

    @property
    def num_blocks(self) -> int:
        """Blocks that forks hold, each once. O(salts)."""
        return sum([len(held) for held in list(self._holds.values())])  # at once: a scrape may ask from another thread

    def note(self, request: Request, token_id: int) -> None:
        """Keep the token that a step gave for a prompt that it has computed, before the sequence has it.

        Nothing if the request has no key, or tokens already; if what it holds isn't of the present cache; or if it
        holds more than there is room for. O(tokens + blocks), and O(salts with quotas).
        """
        key, sequence = request.prompt_key, request.sequence
        if key is None or request.num_output_tokens or key in self._prompts or not _is_cached(sequence):
            return
        block_ids = frozenset([block.block_id for block in blocks_of(self.manager, sequence)])
        most = self._room_of(sequence.salt)
        if len(block_ids) > most or not self.max_prompts:
            return
        fork = self.manager.fork(sequence, ("remembered", next(self._numbers)))
        self._prompts[key] = _Prompt(fork, token_id, block_ids)
        held = self._holds.setdefault(sequence.salt, Counter())
        held.update(block_ids)
        while len(held) > most:  # this one comes last, and fits
            self._drop(next(key for key, prompt in self._prompts.items() if prompt.fork.salt == sequence.salt))
        while self.num_blocks > self.max_blocks or len(self._prompts) > self.max_prompts:
            self.give_up()

    def take_token(self, request: Request) -> int | None:
        """Return the first token of a request that has none yet, and count the answer; None if it isn't known.

        The prompt is the most recently used one then. O(prompt) for one that is known, else O(1).
        """
        key = request.prompt_key
        if key is None or key not in self._prompts or request.num_output_tokens:
            return None
        prompt = self._prompts[key] = self._prompts.pop(key)
        self.num_answers += 1
        return prompt.token_id

    def fork(self, request: Request, num_cached_tokens: int) -> Sequence | None:
        """Return a sequence for a request that was given its token: its tokens, and the KV of its whole prompt.

        num_cached_tokens: what the cache has of the prompt; None if that is all, or nothing else is kept. It has the
        request's id, which no other sequence with blocks may have. O(tokens + blocks).
        """
        key, own = request.prompt_key, request.sequence
        is_better = num_cached_tokens < own.num_prompt_tokens and request.num_output_tokens
        if key is None or key not in self._prompts or not self._prompts[key].is_valid or not is_better:
            return None
        prompt = self._prompts[key] = self._prompts.pop(key)
        twin = self.manager.fork(prompt.fork, own.sequence_id)
        twin.session = own.session
        twin.append_tokens(own.token_ids(own.num_prompt_tokens))
        return twin

    def give_up(self) -> bool:
        """Let go of the least recently used prompt, whose blocks are free then unless others have them, too.

        Returns whether there was one. O(blocks).
        """
        if not self._prompts:
            return False
        self._drop(next(iter(self._prompts)))
        return True

    def drop_stale(self) -> None:
        """Let go of what may be read no more: after a reset, or when a salt was forgotten. O(prompts)."""
        for key in [key for key, prompt in self._prompts.items() if not prompt.is_valid]:
            self._drop(key)

    def clear(self) -> None:
        """Let go of all. O(blocks). Nothing where the manager was interrupted in a change, and refuses everything."""
        with suppress(CorruptStateError):
            while self.give_up():
                pass

    def check(self) -> None:
        """Raise AssertionError unless all here agrees. O(blocks)."""
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

    def _room_of(self, salt: str | None) -> int:
        """How many blocks forks of a salt may hold."""
        quota = next((quota for quota in self.manager.quotas() if quota.salt == salt), None)
        return self.max_blocks if quota is None else min(self.max_blocks, quota.max_cached_blocks)


def make_room(
    manager: KVCacheManager,
    remembered: RememberedPrompts | None,
    sequence: Sequence,
    num_tokens: int,
    hit: CacheHit | None = None,
    loads: Items[TierHit] = (),
) -> bool:
    """Allocate slots for a sequence as `KVCacheManager.allocate_slots` does, at the cost of what is remembered.

    That goes before a pin that may give way, too. Returns whether there was room; raises what that call does. As that.
    """
    if remembered is not None and manager.pins:
        start = sequence.num_computed_tokens if hit is None else hit.num_tokens
        end = start + sum([load.num_tokens for load in loads]) + num_tokens
        while manager.get_num_blocks_to_allocate(sequence, end, hit=hit) > manager.num_free_blocks:
            if not remembered.give_up():
                break
    while manager.allocate_slots(sequence, num_tokens, hit=hit, loads=loads) is None:
        if remembered is None or not remembered.give_up():
            return False
    return True


def _is_cached(sequence: Sequence) -> bool:
    """Whether a sequence is of the present cache, and the last block that it cached is cached still. O(1)."""
    epoch, number = sequence.epoch, sequence.num_cached_blocks
    return epoch is not None and epoch.is_current and (not number or sequence.blocks[number - 1].is_cached)
