"""What a cache that never evicts would find: an upper bound of hits, and a lower bound while nothing is evicted."""

from kvblocks.verify.adapter import CacheAdapter, WalkRequest
from kvblocks.verify.errors import VerificationError

Prefix = tuple[str | None, tuple[int, ...]]


class PossibleHits:
    """The full blocks of requests that have ended since the last reset."""

    def __init__(self, adapter: CacheAdapter) -> None:
        self._block_size = adapter.block_size
        self._finds_all = adapter.finds_all
        self._num_slots = adapter.num_slots
        self._num_taken = 0  # at most so many slots were ever taken
        self._prefixes: set[Prefix] = set()

    def note_scheduled(self, num_tokens: int) -> None:
        """Note that `num_tokens` tokens got slots in one call."""
        self._num_taken += num_tokens + 2 * self._block_size  # a block that is begun and one that is copied

    def note_ended(self, request: WalkRequest) -> None:
        """Note that a request ended. Its last token's KV needn't be kept, since many engines never compute it."""
        size = self._block_size
        for end in range(size, request.num_tokens, size):
            self._prefixes.add((request.salt, tuple(request.token_ids[:end])))

    def forget(self) -> None:
        """Note that everything was reset."""
        self._prefixes.clear()

    def of(self, request: WalkRequest) -> int:
        """Return how many leading tokens of a request can be a hit, never including its last one."""
        size, found = self._block_size, 0
        for end in range(size, len(request.token_ids), size):
            if (request.salt, tuple(request.token_ids[:end])) not in self._prefixes:
                break
            found = end
        return found

    def check(self, request: WalkRequest, num_hit_tokens: int) -> None:
        """Raise VerificationError if a hit is too short although everything fits into the pool."""
        expected = self.of(request)
        if self._finds_all and num_hit_tokens < expected and self._num_taken <= self._num_slots:
            what = f"{request.name!r}: expected a hit of at least {expected} tokens, got {num_hit_tokens}"
            raise VerificationError("missed hit", f"{what}; nothing can have been evicted yet")
