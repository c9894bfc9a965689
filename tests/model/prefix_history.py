"""A history of a `PrefixCache`, and beside it a reference model: dicts of token tuples, and lists. No run or hash."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kvblocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStateError,
    BlockStored,
    FullAttention,
    InvalidArgumentError,
    PinBudgetError,
    PrefixCache,
    PrefixMatch,
    StaleHitError,
)
from kvblocks.prefix_cache.payloads import MAX_PAYLOADS_A_BLOCK
from kvblocks.stats import HitCounts
from model.history import Chooser
from model.kv_memory import KVMemory
from model.reference_model import ModelSequence, Prefix

MAX_TOKENS = 14
MAX_PROMPTS = 8
MAX_MATCHES = 6


class Prompt(ModelSequence):
    """Tokens, salt, lora and keys, as the cache's calls take them."""

    def options(self) -> dict[str, object]:
        return {"salt": self.salt, "lora": self.lora, "extra_keys": self.keys}


@dataclass(eq=False)
class ModelPayload:
    """What is attached to a prefix of any length. block: its last full block, None without one."""

    block: Prefix | None
    prefix: Prefix
    payload: object
    num_bytes: int
    use: int = 0


class PrefixModel:
    def __init__(self, max_blocks: int, block_size: int, pin_budget: float = 0.5, max_bytes: int | None = None) -> None:
        self.max_blocks = max_blocks
        self.max_bytes = max_bytes
        self.max_pinned = int(max_blocks * pin_budget)
        self.block_size = block_size
        self.holders: dict[Prefix, int] = {}
        self.queue: list[Prefix] = []
        self.num_holds: Counter[Prefix] = Counter()
        self.payloads: list[ModelPayload] = []  # the least recently used first
        self.sizes: dict[Prefix, int] = {}
        self.uses: dict[Prefix, int] = {}
        self.clock = 0
        self.num_queries = self.num_hits = self.num_queried = self.num_hit = 0

    def path(self, prompt: ModelSequence) -> list[Prefix]:
        """The full blocks, as prefixes."""
        num_blocks = len(prompt.tokens) // self.block_size
        return [prompt.prefix(n, self.block_size) for n in range(1, num_blocks + 1)]

    def beginning(self, prompt: ModelSequence, num_tokens: int) -> Prefix:
        """The first tokens, and all that their KV depends on."""
        return prompt.prefix(num_tokens, 1)

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values()) + sum([entry.num_bytes for entry in self.payloads])

    def find(self, prompt: ModelSequence) -> list[Prefix]:
        found = []
        for prefix in self.path(prompt):
            if prefix not in self.holders:
                break
            found.append(prefix)
        return found

    def ids(self, path: list[Prefix]) -> list[int]:
        return [self.holders[prefix] for prefix in path]

    def found_payloads(self, prompt: ModelSequence) -> list[tuple[int, ModelPayload]]:
        """Of all beginnings, by their number of tokens."""
        kept = {entry.prefix: entry for entry in self.payloads}
        most = min(len(prompt.tokens), (len(self.find(prompt)) + 1) * self.block_size - 1)
        numbers = [0] if not prompt.tokens else range(1, most + 1)
        pairs = [(number, kept.get(self.beginning(prompt, number))) for number in numbers]
        return [(number, entry) for number, entry in pairs if entry is not None]

    def attach(self, prompt: ModelSequence, num_tokens: int, payload: object, num_bytes: int = 0) -> bool:
        """Attach to a beginning, as the most recently used; None takes away. Whether there was room."""
        path, prefix = self.path(prompt)[: num_tokens // self.block_size], self.beginning(prompt, num_tokens)
        self.payloads = [entry for entry in self.payloads if entry.prefix != prefix]
        if payload is None:
            return True
        new = ModelPayload(path[-1] if path else None, prefix, payload, num_bytes, self.clock)
        if self.max_bytes is None:
            limit = MAX_PAYLOADS_A_BLOCK if path else self.max_blocks
            of_block = [entry for entry in self.payloads if entry.block == new.block]
            for oldest in of_block[: max(len(of_block) + 1 - limit, 0)]:
                self.payloads.remove(oldest)
        elif self.num_bytes + num_bytes > self.max_bytes:
            return False
        self.payloads.append(new)
        return True

    def look_up(self, prompt: ModelSequence) -> list[Prefix]:
        path, payloads = self.find(prompt), self.found_payloads(prompt)
        self.hold(path)
        self.let_go(path)
        if payloads:
            last = payloads[-1][1]
            self.payloads.remove(last)
            self.payloads.append(last)
            last.use = self.clock
        self.num_queries += 1
        self.num_hits += bool(path)
        self.num_queried += len(prompt.tokens)
        self.num_hit += len(path) * self.block_size
        return path

    def hold(self, path: list[Prefix]) -> None:
        for prefix in path:
            if not self.num_holds[prefix] and prefix in self.queue:
                self.queue.remove(prefix)
            self.num_holds[prefix] += 1

    def let_go(self, path: list[Prefix]) -> None:
        for prefix in reversed(path):
            self.num_holds[prefix] -= 1
            if not self.num_holds[prefix]:
                self.queue.append(prefix)
        self.note_used(path)

    def note_used(self, path: list[Prefix]) -> None:
        self.clock += 1
        self.uses.update(dict.fromkeys(path, self.clock))

    def evict(self, num_blocks: int) -> tuple[list[int], list[object]]:
        """Ids, and the payloads that went with them."""
        evicted = [self.queue.pop(0) for _ in range(min(num_blocks, len(self.queue)))]
        gone = [entry for prefix in evicted for entry in self.payloads if entry.block == prefix]
        self.payloads = [entry for entry in self.payloads if entry not in gone]
        for prefix in evicted:
            del self.sizes[prefix], self.uses[prefix]
        return [self.holders.pop(prefix) for prefix in evicted], [entry.payload for entry in gone]

    def free(self, num_bytes: int, before: float = float("inf")) -> tuple[list[int], list[object]]:
        """Evict what was used least recently until so many bytes are freed; no payload that was used later."""
        ids, payloads = [], []
        least = self.num_bytes - num_bytes
        while self.num_bytes > least:
            entry = next((entry for entry in self.payloads if entry.use < before), None)
            if entry is not None and (not self.queue or entry.use <= self.uses[self.queue[0]]):
                self.payloads.remove(entry)
                payloads.append(entry.payload)
            elif self.queue:
                more, gone = self.evict(1)
                ids += more
                payloads += gone
            else:
                break
        return ids, payloads

    def insert(
        self,
        prompt: ModelSequence,
        ids: list[int],
        pin: bool,
        block_bytes: int = 0,
        new: list[tuple[int, object, int]] | None = None,
    ) -> tuple[list[Prefix], int, list[int], list[int], list[object], list[object]]:
        path, found = self.path(prompt), self.find(prompt)
        unused = [i for i, held in zip(ids, self.ids(found), strict=False) if i != held]
        self.hold(found)
        num_missing = len(path) - len(found) - (self.max_blocks - len(self.holders))
        evicted, gone = self.evict(max(num_missing, 0))
        end = min(len(path), len(found) + self.max_blocks - len(self.holders))
        if self.max_bytes is not None:
            more, more_gone = self.free((end - len(found)) * block_bytes - (self.max_bytes - self.num_bytes))
            evicted, gone = evicted + more, gone + more_gone
            if block_bytes:
                end = min(end, len(found) + (self.max_bytes - self.num_bytes) // block_bytes)
        self.holders.update(zip(path[len(found) : end], ids[len(found) : end], strict=True))
        self.sizes.update(dict.fromkeys(path[len(found) : end], block_bytes))
        self.note_used(path[:end])
        now = self.clock
        self.hold(path[len(found) : end])
        unused_payloads = []
        for number, payload, num_bytes in new or ():
            if number // self.block_size > end:
                unused_payloads.append(payload)
                continue
            self.attach(prompt, number, None)
            if self.max_bytes is not None and num_bytes <= self.max_bytes:
                more, more_gone = self.free(num_bytes - (self.max_bytes - self.num_bytes), before=now)
                evicted, gone = evicted + more, gone + more_gone
            if not self.attach(prompt, number, payload, num_bytes):
                unused_payloads.append(payload)
        if not pin:
            self.let_go(path[:end])
            self.uses.update(dict.fromkeys(path[:end], now))
        return path[:end], end - len(found), unused + ids[end:], evicted, gone, unused_payloads


class PrefixHistory:
    """Operations on both. Each does nothing when it has nothing to work on."""

    def __init__(self, max_blocks: int, block_size: int, **options: Any) -> None:
        self.cache = PrefixCache(max_blocks, block_size, enable_events=True, num_history_blocks=4, **options)
        self.model = PrefixModel(max_blocks, block_size, options.get("pin_budget", 0.5), options.get("max_bytes"))
        self.has_bytes = options.get("max_bytes") is not None
        self.names: dict[bytes, int] = {}  # what the events say is cached
        self.name_of: dict[Prefix, bytes] = {}
        self.num_checks = 0
        self.names_are_unique = "hash_algorithm" not in options
        self.prompts: list[Prompt] = []
        self.matches: list[tuple[PrefixMatch, Prompt, list[int] | None]] = []  # and the ids that were read, if any
        self.inserted: dict[int, PrefixMatch] = {}  # matches that came from an insertion
        self.held: list[tuple[PrefixMatch, list[Prefix]]] = []
        self.pins: list[tuple[Prompt, list[Prefix], str | None]] = []
        self.free_ids = [
            7 * i + i % 3 for i in range(max_blocks + MAX_TOKENS + 2)
        ]  # the engine's, neither dense nor from 0 on
        self.all_ids = list(self.free_ids)
        self.memory = KVMemory(max(self.all_ids) + 1, (FullAttention(block_size),), block_size)
        self.met: Counter[str] = Counter()

    def new(self, chooser: Chooser) -> None:
        if self.prompts and chooser.integer(0, 3):  # like another, so that prefixes meet and part at every position
            other = chooser.choose(self.prompts)
            more = [chooser.integer(0, 1) for _ in range(chooser.integer(0, 6))]
            tokens = (other.tokens[: chooser.integer(0, len(other.tokens))] + more)[:MAX_TOKENS]
            spans = {(start, min(end, len(tokens)), key) for start, end, key in other.keys if start < len(tokens)}
            salt, lora = chooser.choose([other.salt, other.salt, "salt"]), other.lora
        else:
            tokens = [chooser.integer(0, 1) for _ in range(chooser.integer(0, MAX_TOKENS))]
            salt, lora, spans = chooser.choose([None, None, "salt"]), chooser.choose([None, None, "lora"]), set()
        if tokens and not chooser.integer(0, 5):
            start = chooser.integer(0, len(tokens) - 1)
            spans.add((start, chooser.integer(start + 1, len(tokens)), chooser.choose("xy")))
        prompt = Prompt("", tokens, salt, lora, tuple(spans))
        self.prompts.append(prompt)
        del self.prompts[:-MAX_PROMPTS]
        names = self.cache.inspect.block_hashes(prompt.tokens, **prompt.options())
        self.name_of.update(zip(self.model.path(prompt), names, strict=True))

    def pick(self, chooser: Chooser) -> Prompt:
        """A prompt, more likely one that is wholly cached."""
        whole = [prompt for prompt in self.prompts if len(self.model.find(prompt)) == len(self.model.path(prompt))]
        return chooser.choose(whole * 3 + self.prompts)

    def match(self, chooser: Chooser) -> None:
        if not self.prompts:
            return
        prompt = self.pick(chooser)
        match = self.cache.match_prefix(prompt.tokens, **prompt.options())
        self.keep(chooser, match, prompt, self.model.ids(self.model.look_up(prompt)))

    def keep(self, chooser: Chooser, match: PrefixMatch, prompt: Prompt, ids: list[int]) -> None:
        """Keep a match, which has these ids, for later operations; perhaps read it now."""
        read = chooser.choose([True, False])
        if read:
            self.compare(match, prompt, ids)
            self.compare_payloads(match, prompt)
        self.matches.append((match, prompt, ids if read else None))
        del self.matches[:-MAX_MATCHES]

    def compare(self, match: PrefixMatch, prompt: Prompt, ids: list[int]) -> None:
        end = len(ids) * self.model.block_size
        assert match.match_length == end
        assert match.matched_kv_blocks == ids
        assert match.packed_kv_blocks == array("q", ids)
        assert match.matched_tokens == prompt.tokens[:end]
        assert match.remaining_tokens == prompt.tokens[end:]
        self.memory.check_blocks(match.matched_kv_blocks, self.numbers(prompt))
        self.met["hits"] += bool(ids)

    def compare_payloads(self, match: PrefixMatch, prompt: Prompt) -> None:
        """Each is the model's, and was made of the context that it is found for, as a recurrent state would be."""
        found = [(number, entry.payload) for number, entry in self.model.found_payloads(prompt)]
        assert match.payloads == found, (match.payloads, found)
        assert match.last_payload == (found[-1] if found else (0, None))
        last, payload = match.last_payload
        assert match.payload == (payload if last == len(prompt.tokens) else None)
        for number, (_, context) in found:
            assert context == self.context(prompt, number)
        self.met["payloads"] += match.payload is not None
        self.met["payloads of beginnings"] += any(0 < number < len(prompt.tokens) for number, _ in found)

    def context(self, prompt: Prompt, num_tokens: int) -> object:
        """The hash of the context after so many tokens."""
        return (prompt.salt, prompt.lora) if not num_tokens else self.numbers(prompt)[num_tokens - 1]

    def match_several(self, chooser: Chooser) -> None:
        """Look several prompts up as of one moment."""
        prompts = [prompt for prompt in self.prompts if prompt.salt is None and prompt.lora is None]
        with self.cache.exclusive():
            matches = [self.cache.match_prefix(prompt.tokens, extra_keys=prompt.keys) for prompt in prompts]
        for match, prompt in zip(matches, prompts, strict=True):
            self.compare(match, prompt, self.model.ids(self.model.look_up(prompt)))
            self.compare_payloads(match, prompt)

    def enter(self, chooser: Chooser) -> None:
        if not self.matches:
            return
        match, prompt, ids = self.matches[chooser.integer(0, len(self.matches) - 1)]
        path = self.model.find(prompt)
        if ids is not None and self.model.ids(path)[: len(ids)] != ids:
            self.met["stale"] += 1
            self.met["stale, of an insertion"] += id(match) in self.inserted
            with self.unchanged(), pytest.raises(StaleHitError):
                match.__enter__()
            return
        assert match.__enter__() is match
        if ids is None:  # nobody has read it: it may say what was cached then, if that is so still, or what is now
            ids = match.matched_kv_blocks
            assert len(ids) == len(path) or self.model.ids(path)[: len(ids)] == ids
            self.matches[:] = [(match, prompt, ids) if other[0] is match else other for other in self.matches]
        self.compare(match, prompt, ids)
        path = path[: len(ids)]
        assert self.model.ids(path) == ids
        self.model.hold(path)
        self.met["held, of an insertion"] += id(match) in self.inserted
        self.held.append((match, path))

    def leave(self, chooser: Chooser) -> None:
        if self.held:
            match, _ = self.held[chooser.integer(0, len(self.held) - 1)]
            last = max(i for i, (held, _) in enumerate(self.held) if held is match)  # nested: the last one first
            _, path = self.held.pop(last)
            match.__exit__(None, None, None)
            self.model.let_go(path)

    def drop(self, chooser: Chooser) -> None:
        """Drop a match that was entered and not left: it releases its blocks, with a warning."""
        if not self.held or chooser.integer(0, 2):
            return
        index = chooser.integer(0, len(self.held) - 1)  # a chooser keeps what it chose
        number = id(self.held[index][0])
        for path in [path for match, path in self.held if id(match) == number]:
            self.model.let_go(path)
        with pytest.warns(ResourceWarning, match="entered and never left"):
            self.forget(number)
        self.met["dropped"] += 1

    def forget(self, number: int) -> None:
        """Drop every reference to the match of this `id`."""
        self.held[:] = [entry for entry in self.held if id(entry[0]) != number]
        self.matches[:] = [entry for entry in self.matches if id(entry[0]) != number]
        self.inserted.pop(number, None)

    def end(self) -> None:
        """Leave what is held."""
        while self.held:
            self.held.pop()[0].__exit__(None, None, None)

    def insert(self, chooser: Chooser) -> None:
        if not self.prompts:
            return
        prompt, pin = chooser.choose(self.prompts), not chooser.integer(0, 9)
        ids = self.choose_ids(chooser, prompt)
        found = self.model.ids(self.model.find(prompt))
        known = set(self.model.holders.values())
        if any(block_id in known and found[i : i + 1] != [block_id] for i, block_id in enumerate(ids)):
            self.met["conflicts"] += 1
            with self.unchanged(), pytest.raises(BlockStateError, match="hold no other prefix"):
                self.cache.insert_prefix(prompt.tokens, ids, pin=pin, **prompt.options())
            return
        if pin and not self.can_pin(len(ids)):
            with self.unchanged(), pytest.raises(PinBudgetError, match=f"got {len(ids)} more than"):
                self.cache.insert_prefix(prompt.tokens, ids, pin=pin, **prompt.options())
            return
        self.memory.store([None if i in known else i for i in ids], self.numbers(prompt))
        num_known = chooser.integer(0, len(found) + 1) * self.model.block_size if chooser.integer(0, 1) else 0
        given = ids[num_known // self.model.block_size :]
        given = chooser.choose([list, iter, lambda items: array("q", items), lambda items: array("i", items)])(given)
        tokens = array("I", prompt.tokens)
        new = self.choose_payloads(chooser, prompt)
        block_bytes = chooser.integer(0, 3) * self.has_bytes
        options = {"block_bytes": block_bytes, "payloads": new, "pin": pin, **prompt.options()}
        if found[: num_known // self.model.block_size] != ids[: num_known // self.model.block_size]:
            num_known, given = 0, ids  # the ids that aren't given would be others than the model's
        if num_known > len(found) * self.model.block_size:
            kind = StaleHitError if num_known <= len(prompt.tokens) else InvalidArgumentError
            with self.unchanged(), pytest.raises(kind, match="num_cached_tokens"):
                self.cache.insert_prefix(tokens, given, num_cached_tokens=num_known, **options)
            self.met["too many known"] += kind is StaleHitError
            given, num_known = ids, 0
        self.met["new blocks alone"] += num_known > 0
        result = self.cache.insert_prefix(tokens, given, num_cached_tokens=num_known, **options)
        tokens.append(7)  # the buffer is the engine's again
        tokens[0] = 7
        self.memory.spoil(i for i in result.unused_kv_blocks if i not in known)
        self.memory.spoil(result.evicted_kv_blocks)
        path, num_new, unused, evicted, gone, unused_payloads = self.model.insert(prompt, ids, pin, block_bytes, new)
        assert result[:4] == (len(path), num_new, unused, evicted)
        assert result.evicted_kv_blocks.payloads == gone
        assert result.unused_payloads == unused_payloads
        self.met["payloads evicted alone"] += bool(gone) and not evicted
        self.met["no room for a payload"] += bool(unused_payloads)
        self.inserted[id(result.match)] = result.match
        self.keep(chooser, result.match, prompt, self.model.ids(path))
        if pin and path:
            self.pins.append((prompt, path, None))
        self.free_ids = [i for i in self.all_ids if i not in self.model.holders.values()]
        self.met["evicting"] += bool(evicted)
        self.met["cut short"] += len(path) < len(ids)

    def choose_payloads(self, chooser: Chooser, prompt: Prompt) -> list[tuple[int, object, int]]:
        """For an insertion, of some beginnings."""
        numbers = {chooser.integer(0, len(prompt.tokens)) for _ in range(chooser.integer(0, 2))}
        numbers = {number for number in numbers if number or not prompt.tokens}
        return [
            (number, (chooser.integer(1, 3), self.context(prompt, number)), chooser.integer(1, 5) * self.has_bytes)
            for number in sorted(numbers)
        ]

    def choose_ids(self, chooser: Chooser, prompt: Prompt) -> list[int]:
        """Free ids, perhaps the cached ones for what is cached, perhaps a wrong one."""
        num_blocks = len(prompt.tokens) // self.model.block_size
        ids = [self.free_ids[(chooser.integer(0, 20) + i) % len(self.free_ids)] for i in range(num_blocks)]
        ids = list(dict.fromkeys([*ids, *self.free_ids]))[:num_blocks]
        if chooser.integer(0, 1):
            found = self.model.ids(self.model.find(prompt))
            ids = found + ids[len(found) :]
        if ids and self.model.holders and not chooser.integer(0, 5):
            wrong = chooser.choose(sorted(self.model.holders.values()))
            if wrong not in ids:
                ids[chooser.integer(0, num_blocks - 1)] = wrong
        return ids

    def evict(self, chooser: Chooser) -> None:
        num_blocks = chooser.integer(0, 4)
        num_bytes = chooser.integer(0, 6) * self.has_bytes
        evicted = self.cache.evict(num_blocks, num_bytes=num_bytes)
        freed, gone = self.model.free(num_bytes) if num_bytes else ([], [])
        more, more_gone = self.model.evict(max(num_blocks - len(freed), 0))
        assert (evicted, evicted.payloads) == (freed + more, gone + more_gone)
        self.memory.spoil(evicted)
        self.met["too few evictable"] += len(evicted) < num_blocks
        self.free_ids += evicted

    def attach(self, chooser: Chooser) -> None:
        if not self.prompts:
            return
        prompt, kind = self.pick(chooser), chooser.choose([None, 1, 2, 3])
        num_tokens = len(prompt.tokens)
        payload = None if kind is None else (kind, self.context(prompt, num_tokens))
        num_bytes = chooser.integer(1, 4) * self.has_bytes * (kind is not None)
        path, model = self.model.path(prompt), self.model
        can_attach = not path or path[-1] in model.holders
        if can_attach:
            model.attach(prompt, num_tokens, None)
            if payload is not None:
                can_attach = model.max_bytes is None or model.num_bytes + num_bytes <= model.max_bytes
                if can_attach and model.max_bytes is not None:
                    model.hold(path)
                    model.let_go(path)
                if can_attach:
                    model.attach(prompt, num_tokens, payload, num_bytes)
                self.met["no room for a payload"] += not can_attach
        assert self.cache.attach(prompt.tokens, payload, num_bytes=num_bytes, **prompt.options()) == can_attach

    def can_pin(self, num_blocks: int) -> bool:
        """Whether the budget has room for a pin of so many blocks."""
        can = sum([len(path) for _, path, _ in self.pins]) + num_blocks <= self.model.max_pinned
        self.met["beyond the pin budget"] += not can
        return can

    def pin(self, chooser: Chooser) -> None:
        if not self.prompts:
            return
        prompt, description = chooser.choose(self.prompts), chooser.choose([None, "a", "b"])
        path = self.model.find(prompt)
        if path and not self.can_pin(len(path)):
            with self.unchanged(), pytest.raises(PinBudgetError, match=f"got {len(path)} more than"):
                self.cache.pin_prefix(prompt.tokens, description, **prompt.options())
            return
        num_tokens = self.cache.pin_prefix(prompt.tokens, description, **prompt.options())
        assert num_tokens == len(path) * self.model.block_size
        self.model.hold(path)
        if path:
            self.pins.append((prompt, path, description))

    def unpin(self, chooser: Chooser) -> None:
        prompts = [prompt for prompt, _, _ in self.pins] * 2 + self.prompts
        if not prompts:
            return
        prompt = chooser.choose(prompts)
        full = self.model.path(prompt)[-1:]
        ours = [i for i, (pinned, _, _) in enumerate(self.pins) if self.model.path(pinned)[-1:] == full]
        num_tokens = self.cache.unpin_prefix(prompt.tokens, **prompt.options())
        if not ours:
            assert num_tokens == 0
            return
        _, path, _ = self.pins.pop(ours[-1])
        assert num_tokens == len(path) * self.model.block_size
        self.model.let_go(path)
        self.met["unpinned"] += 1

    def clear(self, chooser: Chooser) -> None:
        if self.held:
            with self.unchanged(), pytest.raises(BlockStateError, match="expected no match to be held"):
                self.cache.clear()
            return
        cleared = self.cache.clear()
        assert sorted(cleared) == sorted(self.model.holders.values())
        assert cleared.payloads == [entry.payload for entry in self.model.payloads]
        self.memory.spoil(cleared)
        self.pins.clear()
        model = self.model
        for state in (model.holders, model.queue, model.num_holds, model.payloads, model.sizes, model.uses):
            state.clear()
        self.free_ids = list(self.all_ids)

    def misuse(self, chooser: Chooser) -> None:
        cache, num_blocks = self.cache, 2
        tokens = [0] * (num_blocks * self.model.block_size)
        calls: list[Callable[[], object]] = [
            lambda: cache.insert_prefix(tokens, [1]),
            lambda: cache.insert_prefix(tokens, []),
            lambda: cache.insert_prefix(tokens, [1, -1]),
            lambda: cache.insert_prefix(tokens, [1, 1]),
            lambda: cache.insert_prefix([], [-1]),
            lambda: cache.match_prefix([], extra_keys=[(0, 1, "x")]),
            lambda: cache.evict(-1),
            lambda: cache.pin_prefix(tokens, ""),
            lambda: cache.attach(tokens, 1, salt=""),
            lambda: cache.insert_prefix(tokens, [1, 2], payloads=[(len(tokens) + 1, "late", 1)]),
            lambda: cache.insert_prefix(tokens, [1, 2], payloads=[(1, "none", -1)]),
            lambda: cache.attach(tokens, 1, num_bytes=0 if self.has_bytes else 1),
        ]
        with self.unchanged(), pytest.raises(InvalidArgumentError):
            chooser.choose(calls)()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        before = self.snapshot()
        yield
        assert self.snapshot() == before

    def snapshot(self) -> object:
        cache = self.cache
        counts = cache.cached_block_count(), cache.evictable_count(), cache.stats
        lengths = [cache.query_match_len(prompt.tokens, **prompt.options()) for prompt in self.prompts]
        return counts, lengths, cache.inspect.list_pinned(), [cache.inspect.contains_block(i) for i in self.all_ids]

    def check(self) -> None:
        """The cache's own invariants hold, and all that can be seen of it is what the model says."""
        cache, model = self.cache, self.model
        cache.check()
        assert cache.cached_block_count() == len(model.holders) <= model.max_blocks
        assert cache.evictable_count() == len(model.queue)
        assert cache.inspect.num_bytes() == (model.num_bytes if self.has_bytes else 0)
        assert [i for i in self.all_ids if cache.inspect.contains_block(i)] == sorted(model.holders.values())
        assert sorted([*self.free_ids, *model.holders.values()]) == self.all_ids
        assert cache.stats == HitCounts(model.num_queries, model.num_hits, model.num_queried, model.num_hit)
        assert cache.stats.hit_rate == (model.num_hit / model.num_queried if model.num_queried else 0)
        assert cache.stats.mean_match_length == (model.num_hit / model.num_queries if model.num_queries else 0)
        for prompt in self.prompts:
            found = len(model.find(prompt)) * model.block_size
            assert cache.query_match_len(prompt.tokens, **prompt.options()) == found
        if self.num_checks % 4 == 0:
            self.check_explanations()
            self.check_names()
        self.num_checks += 1
        self.check_memory()
        expected = [(list(path[-1][2]), model.ids(path), name) for _, path, name in self.pins]  # type: ignore[call-overload]
        assert sorted(map(repr, cache.inspect.list_pinned())) == sorted(
            f"PinnedPrefix(token_ids={tokens}, kv_block_ids={ids}, description={name!r})"
            for tokens, ids, name in expected
        )

    def check_explanations(self) -> None:
        """Check that explanations say how much is cached, and that there is a miss where there is one."""
        for prompt in self.prompts:
            explanation = self.cache.inspect.explain(prompt.tokens, **prompt.options())
            assert explanation.num_cached_blocks == len(self.model.find(prompt))
            assert explanation.num_full_blocks == len(self.model.path(prompt))
            assert (explanation.cause == "no miss") == (explanation.num_cached_blocks == explanation.num_full_blocks)

    def check_names(self) -> None:
        """Check that the blocks that events report as cached are cached, and that their digests find them."""
        if not self.names_are_unique:
            return
        for event in self.cache.take_events():
            if isinstance(event, BlockStored):
                self.names.update(zip(event.block_hashes, event.block_ids, strict=True))
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.names[name]
            else:
                assert isinstance(event, AllBlocksCleared)
                self.names.clear()
        assert self.names == {self.name_of[prefix]: block_id for prefix, block_id in self.model.holders.items()}
        for name, block_id in self.names.items():
            assert self.cache.inspect.find_block(name) == block_id

    def numbers(self, prompt: ModelSequence) -> list[int]:
        return self.memory.chain(prompt.salt, prompt.lora, prompt.tokens, prompt.keys)

    def check_memory(self) -> None:
        """Check that cached and held blocks have the KV of their tokens, and that pins are the model's."""
        for prefix, block_id in self.model.holders.items():
            self.memory.check_cached(block_id, 0, prefix, len(prefix[2]))  # type: ignore[arg-type]
        prompts = {id(match): prompt for match, prompt, _ in self.matches}
        for match, _ in self.held:
            if id(match) in prompts:
                ids = [block.block_id for block in match.blocks]
                self.memory.check_blocks(ids, self.numbers(prompts[id(match)]))


OPERATIONS: tuple[tuple[Callable[[PrefixHistory, Chooser], None], int], ...] = (
    (PrefixHistory.new, 6),
    (PrefixHistory.match, 8),
    (PrefixHistory.match_several, 2),
    (PrefixHistory.enter, 5),
    (PrefixHistory.leave, 6),
    (PrefixHistory.drop, 1),
    (PrefixHistory.insert, 12),
    (PrefixHistory.evict, 3),
    (PrefixHistory.attach, 6),
    (PrefixHistory.pin, 2),
    (PrefixHistory.unpin, 4),
    (PrefixHistory.misuse, 1),
)
"""Each operation and how often a walk does it. `clear` is left to the caller, since it ends everything."""
