"""`Space`: the prompts of one model and layout. `Resumption`: the token that a prompt can continue from, and with what.

A beginning of a prompt is usable if all its rows are kept from the first token on, the windows' rows for their reach
before its end, and all states exactly at its end.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvblocks.integrations.mlx_lm import layers
from kvblocks.integrations.mlx_lm.cache_layout import CacheLayout, State
from kvblocks.integrations.mlx_lm.disk import StoredPiece
from kvblocks.integrations.mlx_lm.layers import Held
from kvblocks.integrations.mlx_lm.shelf import TOKEN_BYTES, Block, KeptPiece
from kvblocks.integrations.mlx_lm.tokens import PromptTokens

_MOST_SIBLINGS = 16  # are looked at, where the first one may lack the rows of windows
_BLOCKS_OF_A_STRETCH = 64  # are compared at once, when a prompt's beginning is looked for
_ROOM = 256  # rows, as mlx-lm's own caches grow by
_MOST_ROOM = 4096  # more rows: two of the chunks in which mlx-lm computes prompts


class Resumption:
    """A usable beginning of a prompt: its first `num_tokens` tokens, perhaps 0.

    blocks: its blocks, the last of which may be used only in part. part: a piece with the tokens after them, or None.
    states: the states, for each layer that has some. num_excess: by how many tokens to trim layers that are kept whole.
    end: the piece that the states come from. last: the deepest piece of the whole prompt. is_exact: whether an inserted
    prompt ends there and no token remains.
    """

    def __init__(
        self, layout: CacheLayout, block_size: int, blocks: list[Block], part: KeptPiece | None, *, num_tokens: int = 0
    ) -> None:
        self.num_tokens = num_tokens
        self.blocks = blocks
        self.part = part
        self.states: list[State] = []
        self.num_excess = 0
        self.end: KeptPiece | None = None
        self.last: KeptPiece | None = None
        self.is_exact = False
        self._layout = layout
        self._block_size = block_size

    @property
    def is_of_use(self) -> bool:
        """Whether there is anything to continue from."""
        return self.num_tokens > 0 or self.is_exact or bool(self.states)

    def windows(self, number: int, stack: int) -> tuple[int, Any] | None:
        """Return a stack's window rows in block `number`: the position of the first one, and the rows; or None."""
        piece = self.blocks[number].piece if number < len(self.blocks) else self.part
        return None if piece is None else piece.windows.get(stack)

    def pieces(self) -> list[KeptPiece]:
        """Return the pieces that it needs, all in one chain of blocks, the deepest last. O(blocks of windows)."""
        if self.end is not None and self.num_excess:
            return [self.end]
        reach, size = self._layout.most_reach, self._block_size
        first = max(self.num_tokens - reach, 0) // size if reach else len(self.blocks)
        found = dict.fromkeys([*[block.piece for block in self.blocks[first:]], self.part, self.end])
        return [piece for piece in found if piece is not None]

    def shorten(self) -> None:
        """Lower `num_tokens`, if need be, to the largest number at which all windows are complete.

        O(blocks of windows).
        """
        for stack in range(self._layout.num_rows, len(self._layout.stacks)):
            reach = self._layout.stacks[stack].reach
            number = (self.num_tokens - 1) // self._block_size
            while number >= 0:
                first = max(self.num_tokens - reach, 0)
                if (number + 1) * self._block_size <= first:
                    break
                there = self.windows(number, stack)
                if there is None or there[0] > max(first - number * self._block_size, 0):
                    self.num_tokens = number * self._block_size
                number -= 1

    def has_windows(self) -> bool:
        """Whether all windows are complete at `num_tokens`. Changes nothing."""
        num_tokens = self.num_tokens
        self.shorten()
        shortened, self.num_tokens = self.num_tokens, num_tokens
        return shortened == num_tokens

    def build(self, num_more: int) -> list[Any] | None:
        """Return a new prompt cache of the tokens; None if a layer that is kept whole can't be trimmed. O(bytes of KV).

        num_more: how many tokens come next. Rows get room for them, up to a limit, and for the beginning of an answer.
        """
        room = min(num_more, _MOST_ROOM) + _ROOM
        stacks = range(len(self._layout.stacks))
        arrays = [self._join(stack, self._layout.stacks[stack].reach, room) for stack in stacks]
        return self._layout.build(arrays, self.states, self.num_tokens, self.num_excess)

    def _join(self, stack: int, reach: int, room: int) -> mx.array:
        """Return the rows of a stack, as far back as `reach`; 0: all of them, and room for `room` more."""
        size, end = self._block_size, self.num_tokens
        first = max(end - reach, 0) if reach else 0
        parts = []
        for number in range(first // size, -(-end // size)):
            start, array = number * size, None
            if reach:
                there = self.windows(number, stack)
                assert there is not None, "plan: no window rows"
                start, array = start + there[0], there[1]
            elif number < len(self.blocks):
                array = self.blocks[number].rows[stack]
            else:
                assert self.part is not None, "plan: no rows"
                array = self.part.rows[stack]
            parts.append(array[..., max(first - start, 0) : end - start, :])
        if not reach:
            shape = parts[0].shape
            parts.append(mx.zeros((*shape[:-2], room, shape[-1]), parts[0].dtype))
        return mx.concatenate(parts, axis=-2) if len(parts) > 1 else mx.contiguous(parts[0])


class Space:
    """The prompts of one model and layout. name: its name in the index. root: the parent of all first blocks."""

    def __init__(self, name: str, layout: CacheLayout, block_size: int) -> None:
        self.name = name
        self.layout = layout
        self.root = Block(None, b"", [], 0, "system")
        self._block_size = block_size

    def plan(self, prompt: PromptTokens, blocks: list[Block], pieces: Sequence[tuple[int, KeptPiece]]) -> Resumption:
        """Return the longest usable beginning of a prompt. blocks, pieces: what the index found."""
        is_exact = bool(pieces) and pieces[-1][0] == prompt.num_tokens and pieces[-1][1].is_end
        most = prompt.num_tokens if is_exact else prompt.num_tokens - 1
        own = [piece for end, piece in pieces if end <= most]
        plans = [] if self.layout.has_states else [self._plan_rows(prompt, blocks, most)]
        if self.layout.has_states or len(self.layout.stacks) > self.layout.num_rows:
            plans.append(self._plan_piece(blocks, own))
        if self.layout.can_trim:
            plans.append(self._plan_trimmed(prompt, blocks, most))
        plan = max(plans, key=lambda found: (found.num_tokens, bool(found.states)))
        plan.last = pieces[-1][1] if pieces else None
        plan.is_exact = is_exact and plan.num_tokens == prompt.num_tokens
        return plan

    def path(self, prompt: PromptTokens) -> list[Block]:
        """Return the kept blocks of a prompt, from the first on. O(blocks log(siblings))."""
        found: list[Block] = []
        last = self.root
        for end in range(self._block_size, prompt.num_tokens + 1, self._block_size):
            block = last.siblings.get(prompt.wide(end - self._block_size, end))
            if block is None:
                break
            found.append(block)
            last = block
        return found

    def depth(self, tokens: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt are kept. O(their tokens)."""
        size, last, depth = self._block_size, self.root, 0
        stretch = size
        start = 0
        while start < len(tokens):
            wide = PromptTokens.widened(tokens[start : start + stretch])
            for first in range(0, len(wide) - TOKEN_BYTES * size + 1, TOKEN_BYTES * size):
                last = last.siblings.get(wide[first : first + TOKEN_BYTES * size])
                if last is None:
                    return depth
                depth += 1
            start += stretch
            stretch = min(2 * stretch, _BLOCKS_OF_A_STRETCH * size)
        return depth

    def _plan_rows(self, prompt: PromptTokens, blocks: list[Block], most: int) -> Resumption:
        """Plan without states: the last block may be one that only begins as the prompt does."""
        size = self._block_size
        found = len(blocks) * size
        has_windows = len(self.layout.stacks) > self.layout.num_rows
        number, items = self._nearest(prompt, blocks, _MOST_SIBLINGS if has_windows else 1)
        plans = [Resumption(self.layout, size, list(blocks), None, num_tokens=min(most, found))]
        for item in items:
            own, part = ([*blocks, item], None) if isinstance(item, Block) else (list(blocks), item)
            plans.append(Resumption(self.layout, size, own, part, num_tokens=min(most, found + number)))
        for plan in plans:
            plan.shorten()
        return max(plans, key=lambda plan: plan.num_tokens)

    def _nearest(self, prompt: PromptTokens, blocks: list[Block], most: int) -> tuple[int, list[Any]]:
        """Return how many tokens behind its blocks a prompt shares, and `most` blocks or pieces that have them."""
        found = len(blocks) * self._block_size
        wanted = prompt.wide(found, min(found + self._block_size, prompt.num_tokens))
        return (blocks[-1] if blocks else self.root).siblings.nearest(wanted, most)

    def _plan_trimmed(self, prompt: PromptTokens, blocks: list[Block], most: int) -> Resumption:
        """Plan with objects that are kept whole at a later token, and can be trimmed."""
        number, items = self._nearest(prompt, blocks, _MOST_SIBLINGS)
        ends = [end for end in map(_first_end, items if number else blocks[-1:]) if end is not None]
        plan = Resumption(self.layout, self._block_size, [], None)
        if ends:
            end = min(ends, key=lambda piece: piece.num_tokens)
            rows = self._plan_rows(prompt, blocks, most)
            if self.can_trim(end) and (rows.num_tokens or not self.layout.stacks):
                plan = rows
                plan.states, plan.end = end.states or [], end
                plan.num_excess = end.num_tokens - plan.num_tokens
        return plan

    def can_trim(self, piece: KeptPiece) -> bool:
        """Whether a piece can be trimmed to any beginning of its prompt whose rows are kept."""
        return self.layout.can_trim and all(own[0].is_trimmable() for own, _ in piece.states or ())

    def _plan_piece(self, blocks: list[Block], pieces: list[KeptPiece]) -> Resumption:
        """Plan the end of a piece that has all states and windows."""
        for piece in reversed(pieces):
            if piece.states is not None or not self.layout.has_states:
                own = blocks[: piece.num_tokens // self._block_size]
                part = piece if piece.tail else None
                plan = Resumption(self.layout, self._block_size, own, part, num_tokens=piece.num_tokens)
                if plan.has_windows():
                    plan.states, plan.end = piece.states or [], piece
                    return plan
        return Resumption(self.layout, self._block_size, [], None)

    def cut_pieces(self, prompt: PromptTokens, path: Sequence[Block], held: Sequence[Held]) -> list[KeptPiece]:
        """Return the pieces of a prompt, with copies of what they hold. The last one is its end.

        path: all blocks of the prompt. A piece that is kept already gets what it lacks.
        """
        size, layout, num_tokens = self._block_size, self.layout, prompt.num_tokens
        pieces: dict[int, KeptPiece] = {}
        new: list[mx.array] = []
        stretches = layout.stretches(held)

        def piece_at(end: int) -> KeptPiece:
            if end not in pieces:
                pieces[end] = self._piece_at(prompt, path, end)
            return pieces[end]

        def copied(stack: int, first: int, end: int) -> mx.array:
            new.append(mx.contiguous(layout.cut(held, stack, first, end)))
            return new[-1]

        for stack in range(layout.num_rows, len(layout.stacks)):
            there_from = stretches[stack][0]
            start = max(num_tokens - layout.stacks[stack].reach, 0) // size * size
            for number in range(start // size, -(-num_tokens // size)):
                first, end = max(number * size, there_from), min((number + 1) * size, num_tokens)
                piece = piece_at(end)
                if first < end and piece.windows.get(stack, (size, None))[0] > first - number * size:
                    piece.windows[stack] = first - number * size, copied(stack, first, end)
        last = piece_at(num_tokens)
        if last.tail and not last.rows:
            last.rows = [copied(stack, len(path) * size, num_tokens) for stack in range(layout.num_rows)]
        if layout.has_states and last.states is None:
            last.states = []
            for one in held:
                if one.layer.kind == layers.STATE:
                    new += (arrays := [mx.contiguous(array) for array in one.arrays])
                    last.states.append((arrays, one.options))
                elif one.layer.kind == layers.WHOLE:  # `read` has copied it
                    last.states.append((one.arrays, one.options))
        mx.eval(new)
        del pieces[num_tokens]
        return [*pieces.values(), last]

    def _piece_at(self, prompt: PromptTokens, path: Sequence[Block], end: int) -> KeptPiece:
        """Return the piece that is kept at a token, or a new one."""
        number = end // self._block_size
        block = path[number - 1] if number else self.root
        tail = prompt.wide(number * self._block_size, end)
        there = block.siblings.get(tail) if tail else block.piece
        return KeptPiece(block, tail, end) if there is None else there

    def restore_pieces(self, prompt: PromptTokens, stored: Sequence[StoredPiece]) -> list[KeptPiece]:
        """Return pieces of a prompt that were read from disk, the last one at its end. What is kept already stays."""
        path = self.path(prompt)
        pieces = []
        for one in stored:
            piece = self._piece_at(prompt, path, one.num_tokens)
            piece.rows = piece.rows or one.rows
            piece.windows = {**one.windows, **piece.windows}
            piece.states = one.states if piece.states is None else piece.states
            pieces.append(piece)
        return pieces


def _first_end(start: Block | KeptPiece) -> KeptPiece | None:
    """Return the piece with states that ends first, at or behind a block or piece. O(blocks behind it, up to that)."""
    if isinstance(start, KeptPiece):
        return None if start.states is None else start
    level = [start]
    while level:
        ends = [block.piece for block in level if block.piece is not None and block.piece.states is not None]
        ends = ends or [piece for block in level for piece in block.siblings.pieces() if piece.states is not None]
        if ends:
            return min(ends, key=lambda piece: piece.num_tokens)
        level = [child for block in level for child in block.siblings.blocks()]
    return None
