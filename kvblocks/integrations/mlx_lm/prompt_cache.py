"""`BlockPromptCache`: mlx-lm's prompt cache over blocks that all prompts share."""

import logging
import threading
from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, SupportsIndex

import mlx.core as mx

from kvblocks import InvalidArgumentError, PrefixCache, PrefixInsert, PrefixMatch, UnsupportedEngineError
from kvblocks.integrations.mlx_lm import layers
from kvblocks.integrations.mlx_lm.cache_layout import CacheLayout
from kvblocks.integrations.mlx_lm.disk import Disk, DiskOptions, StoredPiece
from kvblocks.integrations.mlx_lm.ends import CACHE_TYPES, Ends
from kvblocks.integrations.mlx_lm.layers import Held
from kvblocks.integrations.mlx_lm.resuming import Resumption, Space
from kvblocks.integrations.mlx_lm.shelf import Block, KeptPiece
from kvblocks.integrations.mlx_lm.tokens import PromptTokens

_LOG = logging.getLogger(layers.NAME)
_MOST = 2**63 - 1
_BLOCKS_AT_ONCE = 64  # are cut and computed together, so that little is held twice


class BlockPromptCache:
    """The calls of `mlx_lm.models.cache.LRUPromptCache`, over blocks of KV that all prompts share.

    model: is checked, if given; an error names layers that can't be kept. max_bytes: the most bytes to keep; the least
    recently used goes first. block_size: tokens per block. max_size: the most prompts whose ends are kept; None: any
    number. disk: where to keep everything on disk, too; None: nowhere. Raises InvalidArgumentError and
    UnsupportedEngineError.

    index: the `PrefixCache` underneath, to read `stats` and `inspect` from; don't change it. Any thread may make calls.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        max_bytes: SupportsIndex = _MOST,
        block_size: SupportsIndex = 64,
        max_size: SupportsIndex | None = None,
        disk: DiskOptions | None = None,
    ) -> None:
        self.max_bytes = min(int(max_bytes), _MOST)
        self.max_size = None if max_size is None else int(max_size)
        if self.max_size is not None and self.max_size < 0:
            raise InvalidArgumentError(f"max_size: expected an int of at least 0, or None, got {max_size}")
        self.index = PrefixCache(_MOST, block_size, max_bytes=self.max_bytes)
        self.block_size = self.index.block_size
        if model is not None:
            check_model(model)
        self._lock = threading.RLock()
        self._spaces: dict[Hashable, dict[Any, Space]] = {}  # by the caller's key, then by layout
        self._num_spaces = 0
        self._blocks: dict[int, Block] = {}
        self._next_id = 0
        self._ends = Ends()
        self._warned: set[str] = set()
        self._disk = None if disk is None else Disk(disk, self.block_size)

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def nbytes(self) -> int:
        """The bytes of everything that is kept; shared parts count once."""
        return self.index.inspect.num_bytes()

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return, by type of insertion, how many ends of prompts are kept, and how many bytes they added."""
        with self._lock:
            ends = self._ends
            return {
                name: {"n_sequences": ends.num_of_type(name), "n_bytes": ends.num_bytes[name]} for name in CACHE_TYPES
            }

    def fetch_nearest_cache(self, model: Hashable, tokens: Sequence[int]) -> tuple[list[Any] | None, list[int]]:
        """Return a prompt cache of as many of these tokens as possible (None: of none), and the remaining tokens.

        model: the caller's name of the model, as given to `insert_cache`. The caller owns the returned cache, and
        nothing of it is shared. If exactly these tokens were inserted, no token remains; otherwise at least one does,
        for its logits. What was found becomes the most recently used. O(tokens found), with a disk O(tokens), plus a
        copy of the KV.
        """
        with self._lock:
            prompt = self._beginning(model, tokens)
            if self._disk is not None and prompt.num_tokens and not prompt.keys:
                self._load(self._disk, model, prompt)
            plans = [(self._plan(space, prompt), space) for space in self._spaces.get(model, {}).values()]
            best, space = max(plans, key=lambda plan: plan[0].num_tokens, default=(None, None))
            made = None if best is None or not best.is_of_use else best.build(len(tokens) - best.num_tokens)
            if made is None or best is None or space is None:
                return None, tokens if type(tokens) is list else list(tokens)
            self._renew(space, prompt, best)
            return made, list(tokens[best.num_tokens :])

    def insert_cache(
        self, model: Hashable, tokens: Sequence[int], prompt_cache: Sequence[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Keep a prompt cache of these tokens. Copies what isn't kept yet, so the caller can go on using its own.

        If the cache has fewer tokens than were given, only those are kept. If a class of layers can't be kept, nothing
        is, and a warning names the class once. O(tokens), plus a copy of the new KV.
        """
        if cache_type not in CACHE_TYPES:
            raise InvalidArgumentError(f"cache_type: expected one of {', '.join(CACHE_TYPES)}, got {cache_type!r}")
        with self._lock:
            try:
                held = [layers.read(cache) for cache in layers.unnested(prompt_cache)]
            except UnsupportedEngineError as error:
                self._warn_once(f"not kept: {error}")
                return
            ends = [one.end for one in held if one.end is not None and one.layer.kind != layers.UNUSED]
            num_tokens = min([len(tokens), *ends])
            layout = CacheLayout(layers.shape_of(prompt_cache), [one.layer for one in held], self.block_size)
            if layout.has_states and max(ends, default=num_tokens) > num_tokens:
                return  # the states are those of another token
            space = self._space(model, layout)
            if num_tokens or not layout.stacks:
                prompt = PromptTokens(tokens[:num_tokens])
                self._insert(space, prompt, held, cache_type)
                if self._disk is not None and self._can_store(prompt, layout) and self._disk.open(model, layout):
                    self._store(self._disk, space, prompt)
            if self.max_size is not None:
                self._trim(self.max_size, _MOST)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evict the least recently used until at most `n_sequences` ends of prompts and `n_bytes` bytes are kept."""
        with self._lock:
            self._trim(_MOST if n_sequences is None else n_sequences, _MOST if n_bytes is None else n_bytes)

    def clear(self) -> None:
        """Forget everything, for example after a change of weights."""
        with self._lock:
            self.index.clear()
            self._spaces.clear()
            self._blocks.clear()
            self._ends = Ends()

    def check(self) -> None:
        """Raise AssertionError unless blocks, pieces and counters agree with the index. For tests.

        O(everything kept).
        """
        with self._lock:
            self.index.check()
            assert self.index.cached_block_count() == len(self._blocks), "blocks that the index doesn't have, or lacks"
            assert all(self.index.inspect.contains_block(number) for number in self._blocks), "another block"
            pieces = {id(piece): piece for piece in self._pieces()}
            assert len(self) == sum([piece.is_end for piece in pieces.values()]), "ends"
            total = sum([piece.num_bytes for piece in pieces.values()])
            blocks = sum([block.num_bytes for block in self._blocks.values()])
            for block in self._blocks.values():
                assert block.num_bytes == max(1, sum([array.nbytes for array in block.rows])), "bytes of a block"
            assert sum(self._ends.num_bytes.values()) == self.nbytes == total + blocks, "bytes"
            assert self.nbytes <= self.max_bytes, "more than max_bytes"

    def _pieces(self) -> Iterator[KeptPiece]:
        roots = [space.root for spaces in self._spaces.values() for space in spaces.values()]
        for block in [*roots, *self._blocks.values()]:
            yield from block.siblings.pieces()
            if block.piece is not None:
                yield block.piece

    # Looking up.

    def _beginning(self, model: Hashable, tokens: Sequence[int]) -> PromptTokens:
        """Return a prompt's beginning, as long as anything of it can be known; with images or a disk, all of it."""
        if self._disk is None:
            depths = [space.depth(tokens) for space in self._spaces.get(model, {}).values()]
            num_tokens = (max(depths, default=0) + 2) * self.block_size
            if num_tokens < len(tokens):
                beginning = PromptTokens(tokens[:num_tokens])
                if not beginning.keys:
                    return beginning
        return PromptTokens(tokens)

    def _plan(self, space: Space, prompt: PromptTokens) -> Resumption:
        match = self.index.match_prefix(prompt.packed, lora=space.name, extra_keys=prompt.keys)
        return space.plan(prompt, [self._blocks[number] for number in match.matched_kv_blocks], match.payloads)

    def _renew(self, space: Space, prompt: PromptTokens, plan: Resumption) -> None:
        """Make the pieces that were used the most recently used, as the index has done with the blocks."""
        if plan.last is not None:
            self._ends.renew(plan.last)
        pieces = plan.pieces()
        if not pieces:
            return
        num_tokens = pieces[-1].num_tokens
        if num_tokens > plan.num_tokens:
            self._renew_pieces(space, PromptTokens.of_wide(pieces[-1].wide_tokens()), pieces)
        elif all(end <= num_tokens or start >= num_tokens for start, end, _ in prompt.keys):  # of no image cut in two
            self._renew_pieces(space, prompt, pieces)

    def _renew_pieces(self, space: Space, prompt: PromptTokens, pieces: Sequence[KeptPiece]) -> None:
        """Make pieces of a prompt, the deepest last, the most recently used, and the blocks before them."""
        num_tokens = pieces[-1].num_tokens
        done = self.index.insert_prefix(
            prompt.packed[:num_tokens],
            (),
            num_cached_tokens=num_tokens // self.block_size * self.block_size,
            payloads=[(piece.num_tokens, piece, piece.num_bytes) for piece in pieces],
            lora=space.name,
            extra_keys=prompt.keys_before(num_tokens),
        )
        self._forget(done, pieces)
        for piece in pieces:
            self._ends.renew(piece)

    # Inserting.

    def _space(self, model: Hashable, layout: CacheLayout) -> Space:
        spaces = self._spaces.setdefault(model, {})
        if layout.key not in spaces:
            spaces[layout.key] = Space(f"space {self._num_spaces}", layout, self.block_size)
            self._num_spaces += 1
        return spaces[layout.key]

    def _insert(self, space: Space, prompt: PromptTokens, held: list[Held], cache_type: str) -> None:
        size = self.block_size
        found = space.path(prompt)
        path = list(found)
        ids = []
        for first in range(len(found), prompt.num_tokens // size, _BLOCKS_AT_ONCE):
            last = min(first + _BLOCKS_AT_ONCE, prompt.num_tokens // size)
            rows = self._cut_rows(space.layout, held, first, last)
            for number in range(first, last):
                tokens = prompt.wide(number * size, (number + 1) * size)
                above = path[-1] if path else space.root
                block = Block(above, tokens, rows[number - first], space.layout.block_bytes, cache_type)
                path.append(block)
                self._blocks[self._next_id] = block
                ids.append(self._next_id)
                self._next_id += 1
        pieces = space.cut_pieces(prompt, path, held)
        self._enter(space, prompt, ids, pieces, cache_type)

    def _enter(
        self, space: Space, prompt: PromptTokens, ids: Sequence[int], pieces: Sequence[KeptPiece], cache_type: str
    ) -> None:
        """Enter a prompt whose blocks and pieces are made. ids: of the new blocks, the prompt's last ones."""
        num_found = prompt.num_tokens // self.block_size - len(ids)
        self._ends.num_bytes[cache_type] += space.layout.block_bytes * len(ids)
        for piece in pieces:
            if piece.is_kept:
                self._ends.remove(piece)
            else:
                piece.cache_type = cache_type
            piece.is_end = piece.is_end or piece.num_tokens == prompt.num_tokens
            piece.measure()
            piece.keep()
            self._ends.add(piece)
        done = self.index.insert_prefix(
            prompt.packed,
            array("q", ids),
            num_cached_tokens=num_found * self.block_size,
            block_bytes=space.layout.block_bytes,
            payloads=[(piece.num_tokens, piece, piece.num_bytes) for piece in pieces],
            lora=space.name,
            extra_keys=prompt.keys,
        )
        self._forget(done, pieces)
        self._drop_superseded(space, prompt, done.match, pieces[-1] if pieces else None)

    def _cut_rows(self, layout: CacheLayout, held: list[Held], first: int, last: int) -> list[list[mx.array]]:
        """Return the rows of blocks `first` to `last` - 1, copied."""
        size = self.block_size
        rows: list[list[mx.array]] = [[] for _ in range(first, last)]
        for stack in range(layout.num_rows):
            cut = layout.cut(held, stack, first * size, last * size)
            for number, own in enumerate(rows):
                own.append(mx.contiguous(cut[..., number * size : (number + 1) * size, :]))
        mx.eval(rows)
        return rows

    def _drop_superseded(self, space: Space, prompt: PromptTokens, match: PrefixMatch, end: KeptPiece | None) -> None:
        """If all layers have rows, ends of the prompt's beginnings are of no use any more: its blocks say it all.

        So they are if layers are kept whole that can be trimmed, and `end`, the prompt's, has them.
        """
        has_rows = not space.layout.has_states and len(space.layout.stacks) == space.layout.num_rows
        if not has_rows and (end is None or not end.is_kept or not space.can_trim(end)):
            return
        kept = match.match_length if match.payload is None else prompt.num_tokens - 1  # if not all of it fitted
        at_none = [] if space.root.piece is None else [(0, space.root.piece)]
        for num_tokens, piece in [*at_none, *match.payloads]:
            if num_tokens <= kept:
                keys = prompt.keys_before(num_tokens)
                self.index.attach(prompt.packed[:num_tokens], None, lora=space.name, extra_keys=keys)
                self._drop(piece)

    # The disk.

    def _load(self, disk: Disk, model: Hashable, prompt: PromptTokens) -> None:
        """Enter what the disk has of a prompt, if that is more than the memory has."""
        layout = disk.known_layout(model)
        if layout is None:
            return
        space, size = self._space(model, layout), self.block_size
        known = self._plan(space, prompt).num_tokens
        path = disk.path(prompt.packed)
        ends = disk.ends(prompt.packed, path)
        end = len(path) * size
        stored: list[StoredPiece] = []
        if layout.has_states or len(layout.stacks) > layout.num_rows:
            most = prompt.num_tokens - 1
            end, stored = self._read_pieces(disk, space, prompt, path, [at for at in ends if known < at <= most])
        if end <= known:
            return
        found = space.path(prompt)
        rows = disk.read_blocks(layout, path[len(found) : end // size])
        if len(found) + len(rows) < end // size:
            end, stored = (len(found) + len(rows)) * size, []
        beginning = prompt.beginning(end)
        ids, last = [], found[-1] if found else space.root
        for number, own in enumerate(rows[: max(end // size - len(found), 0)], len(found)):
            tokens = prompt.wide(number * size, (number + 1) * size)
            last = Block(last, tokens, own, layout.block_bytes, CACHE_TYPES[0])
            self._blocks[self._next_id] = last
            ids.append(self._next_id)
            self._next_id += 1
        self._enter(space, beginning, ids, space.restore_pieces(beginning, stored), CACHE_TYPES[0])

    def _read_pieces(
        self, disk: Disk, space: Space, prompt: PromptTokens, path: Sequence[Any], ends: list[int]
    ) -> tuple[int, list[StoredPiece]]:
        """Read the last piece that has all states, and those before it that its windows reach back to."""
        stored: list[StoredPiece] = []
        end = 0
        for at in reversed(ends):
            if stored and at <= end - space.layout.most_reach - self.block_size:
                break
            piece = disk.read_piece(prompt.packed, path, at)
            if piece is None or (not stored and space.layout.has_states and piece.states is None):
                continue
            end = end or at
            stored.insert(0, piece)
        return end, stored

    def _can_store(self, prompt: PromptTokens, layout: CacheLayout) -> bool:
        """Whether the disk can have a prompt. Warns once that it can't have objects that are kept whole."""
        if layout.has_whole:
            self._warn_once(f"not on the disk: {', '.join(layout.whole_names)}, whose objects are kept whole")
        return not layout.has_whole and not prompt.keys and prompt.num_tokens > 0

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _LOG.warning("%s", text)

    def _store(self, disk: Disk, space: Space, prompt: PromptTokens) -> None:
        path = space.path(prompt)
        pieces = []
        if space.layout.has_states or len(space.layout.stacks) > space.layout.num_rows:
            last = path[-1] if path else space.root
            ends = [last.siblings.get(prompt.wide(len(path) * self.block_size, prompt.num_tokens)), last.piece]
            own = [block.piece for block in path[-(space.layout.most_reach // self.block_size + 2) : -1]]
            pieces = [
                StoredPiece(piece.num_tokens, piece.rows, piece.windows, piece.states)
                for piece in (*own, *ends)
                if isinstance(piece, KeptPiece)
            ]
        disk.store(prompt.packed, [(number, block.rows) for number, block in enumerate(path)], pieces)

    def close(self) -> None:
        """Write what waits for the disk, and close it. What is in memory can still be used."""
        with self._lock:
            if self._disk is not None:
                self._disk.close()

    # Bookkeeping.

    def _drop(self, piece: KeptPiece) -> None:
        if piece.is_kept:
            self._ends.remove(piece)
        piece.forget()

    def _forget(self, done: PrefixInsert, pieces: Sequence[KeptPiece]) -> None:
        attached = {id(piece) for piece in pieces} - {id(piece) for piece in done.unused_payloads}
        for piece in (*done.evicted_kv_blocks.payloads, *done.unused_payloads):
            if id(piece) not in attached:  # or it was evicted, and then attached again
                self._drop(piece)
        self._forget_blocks([*done.evicted_kv_blocks, *reversed(done.unused_kv_blocks)])

    def _forget_blocks(self, ids: Sequence[int]) -> None:
        for number in ids:
            block = self._blocks.pop(number)
            self._ends.num_bytes[block.cache_type] -= block.num_bytes
            block.forget()

    def _trim(self, most_ends: int, most_bytes: int) -> None:
        while len(self) > max(most_ends, 0):
            piece, older = self._ends.next_to_go()
            for other in older:  # of types that keep theirs
                prompt = PromptTokens.of_wide(other.wide_tokens())
                self._renew_pieces(self._space_of(other), prompt, [other])
            while piece.is_kept:
                self._evict(1)
        if self.nbytes > max(most_bytes, 0):
            self._evict(self.nbytes - max(most_bytes, 0))

    def _evict(self, num_bytes: int) -> None:
        evicted = self.index.evict(num_bytes=num_bytes)
        for piece in evicted.payloads:
            self._drop(piece)
        self._forget_blocks(evicted)

    def _space_of(self, piece: KeptPiece) -> Space:
        block = piece.block
        while block.above is not None:
            block = block.above
        spaces = [space for spaces in self._spaces.values() for space in spaces.values()]
        return next(space for space in spaces if space.root is block)


def check_model(model: Any) -> None:
    """Raise UnsupportedEngineError unless all layers of a model can be kept. Makes and drops a cache of the model."""
    from mlx_lm.models.cache import make_prompt_cache

    for cache in layers.unnested(make_prompt_cache(model)):
        layers.read(cache)
