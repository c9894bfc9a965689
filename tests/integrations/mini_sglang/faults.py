"""Caches with one fault each. The tests must notice them, or they would check nothing."""


def make_faults(adapter):
    """Return the faulty subclasses of `adapter.KVBlocksPrefixCache`, for an adapter that a test has imported."""
    cache = adapter.KVBlocksPrefixCache

    class ForgetsSpares(cache):
        """Nobody owns the second page of the same tokens."""

        def _keep_spares(self, handle, pages):
            handle.spares.clear()

    class FreesSpares(cache):
        """Frees the second page at once, though its request goes on. mini-sglang's radix tree does so."""

        def lock_handle(self, handle, unlock=False):
            super().lock_handle(handle, unlock)
            self._loose.update(dict.fromkeys(self._spares))

    class SaysThatTheyWereCached(cache):
        """Says that spares were cached before, so its caller frees them."""

        def insert_prefix(self, input_ids, indices):
            length = self.cache.query_match_len(input_ids) if len(input_ids) else 0
            return super().insert_prefix(input_ids, indices)._replace(cached_len=length)

    class FindsOnePageMore(cache):
        def match_prefix(self, input_ids):
            handle = super().match_prefix(input_ids).cuda_handle
            if handle.match is not None and handle.cached_len + self.page_size <= len(input_ids):
                more = adapter.KVBlocksHandle(handle.cached_len + self.page_size, self, handle.match)
                slots = handle.get_matched_indices()
                object.__setattr__(more, "get_matched_indices", lambda: slots.repeat(2)[: more.cached_len])
                handle = more
            return adapter.base.MatchResult(handle)

    class NeverUnlocks(cache):
        def lock_handle(self, handle, unlock=False):
            if not unlock:
                super().lock_handle(handle)

    class LocksNothing(cache):
        def lock_handle(self, handle, unlock=False):
            pass

    return ForgetsSpares, FreesSpares, SaysThatTheyWereCached, FindsOnePageMore, NeverUnlocks, LocksNothing


NUM_FAULTS = 6
