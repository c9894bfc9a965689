"""Going on from a cache of ours gives what computing everything gives, and skips at least what mlx-lm's skips."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from integrations.mlx_lm.driver import Walk, decode, forward
from integrations.mlx_lm.models import CONFIGS, KEPT_WHOLE, make_model
from kvblocks.integrations.mlx_lm import BlockPromptCache

# Where mlx computes a token in the same way whatever chunk it is in, nothing differs at all. The others differ without
# any cache, too, if tokens are computed one by one, as those of answers are.
TO_THE_BIT = ("llama", "qwen3_next", "lfm2", "llama4")
CLOSE = 1e-5
QUICK = {("llama", 0.4), ("gemma3_text", 0.1), ("lfm2", 0.4)}


@pytest.mark.parametrize("name", CONFIGS)
def test_resumed_equals_cold_and_no_fewer_tokens_are_found(name):
    model = make_model(name)
    walk = Walk(model, BlockPromptCache(model, block_size=8), LRUPromptCache(max_size=10**6))
    for _ in range(16):
        walk.step()
    assert walk.worst <= (0 if name in TO_THE_BIT else CLOSE)
    assert walk.num_hits >= 5
    if name != "llama4":  # whose caches mlx-lm trims wrongly: see below
        assert walk.num_worse == 0 and walk.num_computed <= walk.num_theirs
    if name != "mamba2":  # whose states are all that it has
        assert walk.ours.nbytes < walk.theirs.nbytes / 2


@pytest.mark.parametrize("name", KEPT_WHOLE)
def test_layers_that_are_kept_whole_are_found_as_by_mlx_lm(name):
    """Exactly what mlx-lm's own cache finds: the ends of prompts."""
    model = make_model(name)
    walk = Walk(model, BlockPromptCache(model, block_size=8), LRUPromptCache(max_size=10**6), seed=5)
    for _ in range(6):
        walk.step()
    assert walk.worst <= CLOSE and walk.num_hits >= 2
    assert walk.num_computed == walk.num_theirs


@pytest.mark.parametrize(
    ("name", "share"),
    [
        pytest.param(name, share, marks=() if (name, share) in QUICK else pytest.mark.slow)
        for name in CONFIGS
        for share in (0.1, 0.4)
    ],
)
def test_a_tight_budget_holds_and_nothing_wrong_is_found(name, share):
    model = make_model(name)
    free = Walk(model, BlockPromptCache(model, block_size=8), seed=1)
    for _ in range(12):
        free.step()
    tight = Walk(model, BlockPromptCache(model, block_size=8, max_bytes=int(free.ours.nbytes * share)), seed=1)
    for _ in range(12):
        tight.step()
        assert tight.ours.nbytes <= tight.ours.max_bytes
    assert tight.worst <= (0 if name in TO_THE_BIT else CLOSE)
    assert tight.num_computed >= free.num_computed


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(2, 5))
def test_long_walks(name, seed):
    model = make_model(name, seed)
    theirs = LRUPromptCache(max_size=10**6)
    walk = Walk(model, BlockPromptCache(model, block_size=seed + 3, max_bytes=2**63 - 1), theirs, seed)
    for _ in range(80):
        walk.step()
    assert walk.worst <= (0 if name in TO_THE_BIT else CLOSE)
    assert name == "llama4" or walk.num_worse == 0


def test_mlx_lm_trims_chunked_caches_wrongly():
    """So its own cache "finds" more for Llama 4, with layers that disagree about how many tokens they have."""
    model = make_model("llama4")
    cache = make_prompt_cache(model)
    tokens = [7 * i % 90 for i in range(60)]
    logits = forward(model, cache, tokens)
    theirs = LRUPromptCache()
    theirs.insert_cache("model", tokens + decode(model, cache, logits[-1], 4), cache)
    edited = [*tokens[:20], 99, 98]
    found, rest = theirs.fetch_nearest_cache("model", edited)
    assert found is not None and rest == [99, 98]
    assert len({one.offset for one in found}) > 1
    wrong = forward(model, found, rest)
    right = forward(model, make_prompt_cache(model), edited)[-2:]
    assert float(mx.abs(wrong - right).max()) > 1e-3
