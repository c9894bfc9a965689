"""Draws the calls of a walk: requests that share prefixes, in a pool that is nearly always full."""

import random

from kvblocks.verify.adapter import WalkRequest
from kvblocks.verify.calls import Call, EndStep, FailStep, Free, Grow, Reset, Start
from kvblocks.verify.player import Player

_MAX_RUNNING = 6
_MAX_REMEMBERED = 12


class Walk:
    """Draws the calls of one walk, which depend on a seed and on what runs."""

    def __init__(self, seed: int | str, player: Player) -> None:
        self._random = random.Random(seed)
        self._player = player
        self._past: list[tuple[tuple[int, ...], str | None]] = []  # what earlier requests had in the end
        self._num_requests = 0
        size = max(4, player.adapter.block_size)
        self._max_tokens = max(2, min(6 * size, player.adapter.num_slots * 2 // 3))

    def next(self) -> Call:
        """Return the next call."""
        running = list(self._player.running.values())
        kind = self._random.choices(("start", "grow", "free", "step", "die", "reset"), (30, 40, 14, 12, 3, 0.5))[0]
        if kind == "die":
            return FailStep()
        if kind == "reset":
            return Reset()
        if kind == "step":
            return EndStep()
        if not running or (kind == "start" and len(running) < _MAX_RUNNING):
            return self._start()
        request = self._random.choice(running)
        if kind == "grow" and len(request.token_ids) < self._max_tokens:
            return self._grow(request)
        self._remember(request)
        return Free(request.name)

    def _start(self) -> Start:
        self._num_requests += 1
        tokens, salt = self._prompt()
        num_tokens = len(tokens) if self._random.random() < 0.6 else self._random.randint(1, len(tokens))
        return Start(f"request {self._num_requests}", tokens, salt, num_tokens)

    def _prompt(self) -> tuple[tuple[int, ...], str | None]:
        """Draw a prompt: new, or one that begins as another does, which may be running."""
        salt = self._random.choice((None, None, "a")) if self._player.adapter.has_salts else None
        others = [*self._past, *((tuple(r.token_ids), r.salt) for r in self._player.running.values())]
        length = self._random.randint(1, self._max_tokens)
        if not others or self._random.random() < 0.15:
            return self._tokens(length), salt
        shared, salt_of_other = self._random.choice(others)
        kept = shared[: self._random.choice((len(shared), self._random.randint(0, len(shared))))]
        more = self._tokens(self._random.choice((0, 1, self._random.randint(0, length))))
        tokens = (kept + more)[: self._max_tokens]
        return tokens or (0,), salt_of_other if self._random.random() < 0.9 else salt

    def _grow(self, request: WalkRequest) -> Grow:
        waiting = len(request.token_ids) - request.num_tokens
        if waiting:
            return Grow(request.name, (), self._random.randint(1, waiting))
        more = self._tokens(self._random.choice((1, 1, 1, 2, self._player.adapter.block_size + 1)))
        return Grow(request.name, more, len(more))

    def _tokens(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(2) for _ in range(length))  # two tokens, so that prefixes meet and part

    def _remember(self, request: WalkRequest) -> None:
        self._past.append((tuple(request.token_ids), request.salt))
        del self._past[:-_MAX_REMEMBERED]
