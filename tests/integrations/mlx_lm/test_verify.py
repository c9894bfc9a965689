"""mlx-lm's own prompt cache and ours in its place, walked by `kvblocks.verify`, and faults of such a cache."""

from types import SimpleNamespace

import mlx_lm.models.cache as theirs
import pytest

from kvblocks import verify
from kvblocks.integrations.mlx_lm import BlockPromptCache
from kvblocks.verify.adapters.mlx_lm import MlxLmAdapter


class OurAdapter(MlxLmAdapter):
    block_size = 4

    def make(self, max_size):
        return BlockPromptCache(block_size=self.block_size, max_size=2 * max_size)

    def forget(self):
        self.cache.clear()


class TrimsTooLittle(theirs.LRUPromptCache):
    """Leaves a token of the longer prompt."""

    def fetch_nearest_cache(self, model, tokens):
        cache, rest = super().fetch_nearest_cache(model, tokens)
        found = self._trie.search(model, tokens)
        if cache is not None and rest and found.longer and cache[0].offset < len(found.longer):
            cache[0].offset += 1
        return cache, rest


class OneModel(theirs.LRUPromptCache):
    """Takes all models for one."""

    def fetch_nearest_cache(self, model, tokens):
        return super().fetch_nearest_cache("one", tokens)

    def insert_cache(self, model, tokens, prompt_cache, **options):
        super().insert_cache("one", tokens, prompt_cache, **options)


@pytest.mark.parametrize("adapter", [MlxLmAdapter, OurAdapter])
def test_the_cache_has_no_fault(adapter):
    report = verify.run(adapter, 3000)
    assert {"hits", "hits on what runs", "steps that died", "resets"} <= report.met.keys()


@pytest.mark.parametrize("fault", [TrimsTooLittle, OneModel])
def test_a_fault_is_found(fault):
    class Faulty(MlxLmAdapter):
        def make(self, max_size):
            return fault(max_size)

    with pytest.raises(verify.VerificationError, match="wrong KV"):
        verify.run(Faulty, 20_000)


def test_a_cache_that_hands_out_what_it_keeps_is_found(monkeypatch):
    monkeypatch.setattr(theirs, "copy", SimpleNamespace(deepcopy=lambda kept: kept))
    with pytest.raises(verify.VerificationError, match=r"wrong KV|missing slots"):
        verify.run(MlxLmAdapter, 20_000)
