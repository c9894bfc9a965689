"""The calls of `BlockPromptCache`, one by one, and every class of cache objects."""

import logging
import random

import mlx.core as mx
import pytest
from mlx_lm.generate import batch_generate
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    LRUPromptCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from integrations.mlx_lm.driver import decode, forward
from integrations.mlx_lm.models import make_model
from kvblocks import InvalidArgumentError, UnsupportedEngineError
from kvblocks.integrations.mlx_lm import BlockPromptCache

SIZE = 8
TOKENS = [10 + i % 90 for i in range(60)]


def rows(number: int, width: int = 64, first: int = 0) -> mx.array:
    """Rows that differ in every place."""
    return (mx.arange(first * width, (first + number) * width) % 997).reshape(1, 1, number, width).astype(mx.float32)


def filled(cache, number: int):
    """A cache object with `number` tokens, that come in as a prompt and then one by one."""
    start = 0
    while start < number:
        count = number - 5 if start == 0 and number > 5 else 1
        cache.update_and_fetch(rows(count, first=start), rows(count, first=start) + 0.5)
        start += count
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
    return cache


def contents(cache, number: int = 3):
    """What attention sees of a cache object when the next tokens come; the oldest row first."""
    if isinstance(cache, CacheList):
        return [contents(one) for one in cache.caches]
    if isinstance(cache, ArraysCache):
        return [None if state is None else state.tolist() for state in cache.cache]
    found = cache.update_and_fetch(rows(number, first=5000), rows(number, first=5000))
    return [mx.array(one).tolist() if isinstance(one, mx.array) else [part.tolist() for part in one] for one in found]


def quantized(number: int):
    return filled(KVCache(), number).to_quantized(group_size=32, bits=4)


MAKERS = {
    "KVCache": lambda number: filled(KVCache(), number),
    "ConcatenateKVCache": lambda number: filled(ConcatenateKVCache(), number),
    "QuantizedKVCache": quantized,
    "RotatingKVCache": lambda number: filled(RotatingKVCache(20), number),
    "RotatingKVCache that is larger": lambda number: filled(RotatingKVCache(1000), number),
    "RotatingKVCache with sinks": lambda number: filled(RotatingKVCache(20, keep=4), number),
    "ChunkedKVCache": lambda number: filled(ChunkedKVCache(20), number),
    "CacheList": lambda number: CacheList(filled(KVCache(), number), filled(RotatingKVCache(12), number)),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("number", [3, 8, 60])
def test_every_class_comes_back_as_it_was(name, number):
    cache = BlockPromptCache(block_size=SIZE)
    cache.insert_cache("m", TOKENS[:number], [MAKERS[name](number), MAKERS[name](number)])
    found, rest = cache.fetch_nearest_cache("m", [*TOKENS[:number], 7, 7])
    assert rest == [7, 7]
    assert [type(one) for one in found] == [type(MAKERS[name](1))] * 2
    assert [contents(one) for one in found] == [contents(MAKERS[name](number)) for _ in found]
    exact, rest = cache.fetch_nearest_cache("m", TOKENS[:number])
    assert rest == [] and contents(exact[0]) == contents(MAKERS[name](number))
    cache.check()


@pytest.mark.parametrize(
    "name", ["KVCache", "ConcatenateKVCache", "QuantizedKVCache", "RotatingKVCache that is larger"]
)
def test_any_beginning_of_rows_is_of_use(name):
    cache = BlockPromptCache(block_size=SIZE)
    cache.insert_cache("m", TOKENS, [MAKERS[name](60)])
    for number in (1, 7, 8, 9, 31, 56, 58):
        found, rest = cache.fetch_nearest_cache("m", [*TOKENS[:number], 7])
        assert rest == [7]
        # mlx-lm's own ConcatenateKVCache goes on behind the rows that were trimmed.
        expected = MAKERS["KVCache" if name == "ConcatenateKVCache" else name](60)
        expected.trim(60 - number)
        assert contents(found[0]) == contents(expected)


@pytest.mark.parametrize("number", [8, 60])
def test_rows_have_room_for_what_comes_next(number):
    """So that going on copies them once."""
    cache = BlockPromptCache(block_size=SIZE)
    cache.insert_cache("m", TOKENS[:number], [filled(KVCache(), number), quantized(number)])
    found, rest = cache.fetch_nearest_cache("m", [*TOKENS[:number], *[7] * 30])
    assert len(rest) == 30 and all(one.offset == number for one in found)
    assert found[0].keys.shape[-2] == found[1].keys[0].shape[-2] == number + 30 + 256
    found, _ = cache.fetch_nearest_cache("m", [*TOKENS[:number], *[7] * 99_000])
    assert found[0].keys.shape[-2] == number + 4096 + 256
    cache.insert_cache("m", [*TOKENS[:number], 7], found)  # room is no token
    assert len(cache.fetch_nearest_cache("m", [*TOKENS[:number], 7])[1]) == 1
    cache.check()


def test_the_tokens_behind_what_is_known_are_not_looked_at():
    cache = BlockPromptCache(block_size=SIZE)
    cache.insert_cache("m", TOKENS, [filled(KVCache(), 60)])
    for known in (0, 1, 8, 30, 60):
        tokens = [*TOKENS[:known], *[7] * 100, "no token"]
        found, rest = cache.fetch_nearest_cache("m", tokens)
        assert (found is None) == (known == 0) and rest == tokens[known:]


def test_states_are_of_use_where_they_were_kept_and_nowhere_else():
    def states(number):
        made = ArraysCache(3)
        made[0], made[2] = mx.full((1, 4), number), mx.full((1, 2, 3), -number)
        return made

    cache = BlockPromptCache(block_size=SIZE)
    for number in (5, 16, 33):
        cache.insert_cache("m", TOKENS[:number], [filled(KVCache(), number), states(number)])
    for number, at in [(60, 33), (33, 33), (32, 16), (16, 16), (15, 5), (5, 5)]:
        found, rest = cache.fetch_nearest_cache("m", [*TOKENS[:number], 7])
        assert len(rest) == number + 1 - at
        assert contents(found[1]) == contents(states(at)) and contents(found[0]) == contents(filled(KVCache(), at))
    assert cache.fetch_nearest_cache("m", [*TOKENS[:4], 7]) == (None, [*TOKENS[:4], 7])
    assert len(cache) == 3


def test_nothing_is_shared_with_a_caller():
    cache = BlockPromptCache(block_size=SIZE)
    given = [filled(KVCache(), 60), filled(RotatingKVCache(20), 60)]
    cache.insert_cache("m", TOKENS, given)
    expected = [contents(MAKERS[name](60)) for name in ("KVCache", "RotatingKVCache")]
    for one in given:
        one.keys[...] = 0  # and whatever else its owner may do
    for _ in range(2):
        found, _ = cache.fetch_nearest_cache("m", [*TOKENS, 7])
        assert [contents(one) for one in found] == expected
        for one in found:
            one.keys[...] = 0


def test_what_prompts_share_is_kept_once():
    cache = BlockPromptCache(block_size=SIZE)
    cache.insert_cache("m", TOKENS[:40], [filled(KVCache(), 40)], cache_type="system")
    once = cache.nbytes
    assert once == 40 * 2 * 64 * 4 + 1  # two rows a token, and an end that holds nothing
    for user in range(1, 5):
        cache.insert_cache("m", [*TOKENS[:40], *[user] * 8], [filled(KVCache(), 48)])
    assert cache.nbytes == (40 + 4 * 8) * 2 * 64 * 4 + 4
    assert len(cache) == 4
    stats = cache.stats_by_type()
    assert stats["system"] == {"n_sequences": 0, "n_bytes": once - 1} and stats["user"]["n_bytes"] == 0
    assert stats["assistant"] == {"n_sequences": 4, "n_bytes": cache.nbytes - once + 1}
    assert cache.fetch_nearest_cache("other model", TOKENS) == (None, TOKENS)
    cache.check()
    cache.clear()
    assert cache.nbytes == len(cache) == 0 and cache.fetch_nearest_cache("m", TOKENS) == (None, TOKENS)


def test_what_was_used_least_recently_goes_first():
    block = SIZE * 2 * 64 * 4
    cache = BlockPromptCache(block_size=SIZE, max_bytes=10 * block)
    prompts = [[user, *TOKENS[:23]] for user in range(3)]
    for prompt in prompts:
        cache.insert_cache("m", prompt, [filled(KVCache(), 24)])
    assert cache.fetch_nearest_cache("m", [*prompts[0], 7])[1] == [7]
    cache.insert_cache("m", [9, *TOKENS[:23]], [filled(KVCache(), 24)])
    lengths = [len(cache.fetch_nearest_cache("m", [*prompt, 7])[1]) for prompt in prompts]
    assert lengths[0] == lengths[2] == 1 and lengths[1] > 1
    cache.trim_to(n_bytes=4 * block)
    assert cache.nbytes <= 4 * block
    cache.trim_to(n_sequences=1)
    assert len(cache) <= 1
    cache.trim_to(n_sequences=0, n_bytes=-5)
    assert cache.nbytes == 0
    cache.check()


def test_a_hit_renews_all_that_it_needs():
    """With windows it needs more pieces than the last one."""
    prompt = [filled(KVCache(), 60), filled(RotatingKVCache(30), 60)]
    cache = BlockPromptCache(block_size=SIZE)
    cache.insert_cache("m", TOKENS, prompt)
    cache = BlockPromptCache(block_size=SIZE, max_bytes=5 * cache.nbytes // 2)
    cache.insert_cache("m", TOKENS, prompt)
    for user in range(200, 208):
        assert cache.fetch_nearest_cache("m", [*TOKENS, user])[1] == [user]
        cache.insert_cache("m", [user, *TOKENS[:59]], prompt)
        cache.check()


def test_the_number_of_ends_may_be_bounded():
    cache = BlockPromptCache(block_size=SIZE, max_size=2)
    for user in range(5):
        cache.insert_cache("m", [user, *TOKENS], [filled(KVCache(), 61)])
        cache.check()
    assert len(cache) == 2


def test_a_bound_of_the_number_of_ends_goes_by_types_as_mlx_lm_s():
    """A type with more ends than the next one loses first, however lately they were used."""
    ours, theirs = BlockPromptCache(block_size=SIZE, max_size=4), LRUPromptCache(max_size=4)
    source = random.Random(3)
    for number in range(60):
        tokens = [number, *TOKENS[:10]]
        cache_type = source.choice(["assistant", "assistant", "user", "system"])
        for cache in (ours, theirs):
            cache.insert_cache("m", tokens, [filled(KVCache(), 11)], cache_type=cache_type)
        ours.check()
        counts = [[one["n_sequences"] for one in cache.stats_by_type().values()] for cache in (ours, theirs)]
        assert counts[0] == counts[1] and len(ours) == min(number + 1, 4)
    prompts = [[number, *TOKENS[:10]] for number in range(60)]
    kept = [[not cache.fetch_nearest_cache("m", prompt)[1] for prompt in prompts] for cache in (ours, theirs)]
    assert kept[0] == kept[1] and sum(kept[0]) == 4


def test_images_with_equal_tokens_are_told_apart():
    """The server puts an id of the image in the place of its patches; see `_make_vision` there."""
    cat, dog = -(2**59) - 11, -(2**59) - 12
    prompts = {image: [*TOKENS[:5], *[image] * 20, *TOKENS[5:15]] for image in (cat, dog)}
    cache = BlockPromptCache(block_size=SIZE)
    cache.insert_cache("m", prompts[cat], [filled(KVCache(), 35)])
    assert cache.fetch_nearest_cache("m", [*prompts[cat], 7])[1] == [7]
    assert len(cache.fetch_nearest_cache("m", prompts[dog])[1]) == 30
    cache.insert_cache("m", prompts[dog], [filled(KVCache(), 35)])
    assert cache.fetch_nearest_cache("m", [*prompts[dog], 7])[1] == [7]
    assert len(cache.fetch_nearest_cache("m", [*prompts[cat][:12], 7])[1]) == 5  # an image of other patches
    cache.check()


def test_a_cache_of_fewer_tokens_than_are_given():
    """As after speculation: a draft model's cache may lag behind."""
    cache = BlockPromptCache(block_size=SIZE)
    cache.insert_cache("m", TOKENS, [filled(KVCache(), 60), filled(KVCache(), 57)])
    found, rest = cache.fetch_nearest_cache("m", [*TOKENS, 7])
    assert rest == [*TOKENS[57:], 7] and [one.offset for one in found] == [57, 57]
    states = ArraysCache(1)
    states[0] = mx.ones((1, 2))
    cache.insert_cache("m", TOKENS[:50], [filled(KVCache(), 60), states])
    assert cache.fetch_nearest_cache("m", [*TOKENS, 7])[1] == [*TOKENS[57:], 7]  # the states are those after 60
    cache.insert_cache("m", [], [filled(KVCache(), 8)])
    cache.check()


def test_layers_that_hold_nothing_stay_empty():
    cache = BlockPromptCache(block_size=SIZE)
    empty = [KVCache(), RotatingKVCache(9, keep=2), ArraysCache(2), QuantizedKVCache(32, 4), ChunkedKVCache(9)]
    cache.insert_cache("m", TOKENS, [filled(KVCache(), 60), *empty])
    found, _ = cache.fetch_nearest_cache("m", [*TOKENS, 7])
    assert [type(one) for one in found[1:]] == [type(one) for one in empty]
    assert all(one.empty() for one in found[1:]) and found[2].keep == 2 and found[4].bits == 4


class Strange:
    """A class that nobody knows: one value a token."""

    def __init__(self, number: int = 0, is_trimmable: bool = False, least: int = 0) -> None:
        self.array = mx.arange(number)
        self._is_trimmable = is_trimmable
        self._least = least

    @property
    def nbytes(self):
        return self.array.nbytes

    def is_trimmable(self):
        return self._is_trimmable

    def trim(self, number):
        number = min(number, self.array.size - self._least)
        self.array = self.array[: self.array.size - number]
        return number


class Closed(Strange):
    """One that can't be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("no copies")


class Halves(Strange):
    """One that counts in its own way."""

    offset = mx.array([30])


@pytest.mark.parametrize("number", [5, 16, 33])
def test_an_unknown_class_is_kept_whole(number):
    cache = BlockPromptCache(block_size=SIZE)
    given = [filled(KVCache(), number), CacheList(Strange(number), filled(KVCache(), number))]
    cache.insert_cache("m", TOKENS[:number], given)
    cache.check()
    given[1][0].array[...] = 0  # its owner goes on
    for tokens in (TOKENS[:number], TOKENS[: number + 9], [*TOKENS[:number], 7]):
        found, rest = cache.fetch_nearest_cache("m", tokens)
        assert rest == tokens[number:] and found[1][0].array.tolist() == list(range(number))
        assert contents(found[0]) == contents(found[1][1]) == contents(filled(KVCache(), number))
        found[1][0].array[...] = 0
    assert cache.fetch_nearest_cache("m", TOKENS[: number - 1]) == (None, TOKENS[: number - 1])
    cache.insert_cache("m", TOKENS[:40], [filled(KVCache(), 40), CacheList(Strange(40), filled(KVCache(), 40))])
    assert len(cache) == 2  # each of them is right at its end alone


@pytest.mark.parametrize("has_rows", [True, False])
def test_an_unknown_class_that_can_be_trimmed_is_of_use_before_its_end(has_rows):
    def made(number: int):
        return [Strange(number, is_trimmable=True), *([filled(KVCache(), number)] if has_rows else [])]

    cache = BlockPromptCache(block_size=SIZE)
    cache.insert_cache("m", TOKENS[:24], made(24))
    cache.insert_cache("m", TOKENS[:45], made(45))
    assert len(cache) == 1
    cache.insert_cache("m", [*TOKENS[:20], *range(200, 240)], made(60))
    cache.check()
    for number in (1, 7, 8, 19, 20, 21, 24, 40, 44):
        tokens = [*TOKENS[:number], 7]
        found, rest = cache.fetch_nearest_cache("m", tokens)
        assert rest == [7] and found[0].array.tolist() == list(range(number))
        assert not has_rows or contents(found[1]) == contents(filled(KVCache(), number))
    assert cache.fetch_nearest_cache("m", TOKENS[:24])[1] == TOKENS[23:24]  # for its logits
    found, rest = cache.fetch_nearest_cache("m", TOKENS[:1])
    assert rest == TOKENS[:1] and (found is None if has_rows else found[0].array.size == 0)
    assert cache.fetch_nearest_cache("m", TOKENS[:45])[1] == []
    assert cache.fetch_nearest_cache("m", [1, *TOKENS]) == (None, [1, *TOKENS])


def test_an_object_that_trims_less_than_it_was_told_is_not_used():
    cache = BlockPromptCache(block_size=SIZE)
    cache.insert_cache("m", TOKENS, [Strange(60, is_trimmable=True, least=30)])
    assert cache.fetch_nearest_cache("m", TOKENS[:35])[1] == TOKENS[34:35]
    assert cache.fetch_nearest_cache("m", TOKENS[:20]) == (None, TOKENS[:20])


def test_what_cannot_be_kept_is_refused_by_its_name(caplog):
    class Model:
        layers = ()

        def make_cache(self):
            return [KVCache(), CacheList(KVCache(), object())]

    with pytest.raises(UnsupportedEngineError, match=r"got object: it can't be kept: AttributeError.*nbytes"):
        BlockPromptCache(Model())
    cache = BlockPromptCache(block_size=SIZE)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            cache.insert_cache("m", TOKENS, [filled(KVCache(), 60), Closed(60)])  # a server goes on
            cache.insert_cache("m", TOKENS, [Halves(60)])
            cache.insert_cache("m", TOKENS, [BatchKVCache([0, 3])])
            cache.insert_cache("m", TOKENS, [ArraysCache(2, left_padding=[1, 2])])
    assert [record.message.split("got ")[1].split(":")[0] for record in caplog.records] == [
        "Closed",
        "Halves",
        "BatchKVCache",
        "an ArraysCache with padding",
    ]
    assert cache.nbytes == 0 and cache.fetch_nearest_cache("m", TOKENS) == (None, TOKENS)


@pytest.mark.parametrize("options", [{"block_size": 0}, {"max_bytes": -1}, {"max_size": -1}])
def test_bad_options(options):
    with pytest.raises(InvalidArgumentError):
        BlockPromptCache(**options)
    with pytest.raises(InvalidArgumentError, match="cache_type: expected one of assistant, user, system, got 'tool'"):
        BlockPromptCache().insert_cache("m", TOKENS, [filled(KVCache(), 60)], cache_type="tool")


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2"])
def test_batched_generation_takes_and_gives_prompt_caches(name):
    model = make_model(name)
    cache = BlockPromptCache(model, block_size=SIZE)
    prompts = [[*TOKENS[:40], user, *TOKENS[user:]] for user in range(20, 23)]

    class Tokenizer:
        eos_token_ids = frozenset()
        detokenizer = None

        def decode(self, tokens):
            return tokens

    def answers(caches, rests):
        done = batch_generate(model, Tokenizer(), rests, prompt_caches=caches, max_tokens=9, return_prompt_caches=True)
        return done.texts, done.caches

    cold, caches = answers([make_prompt_cache(model) for _ in prompts], prompts)
    for prompt, text, one in zip(prompts, cold, caches, strict=True):
        cache.insert_cache("m", (prompt + text)[: len(prompt) + 9], one)
        cache.check()
    longer = [[*prompt, *text, 99, 98] for prompt, text in zip(prompts, cold, strict=True)]
    expected, _ = answers([make_prompt_cache(model) for _ in prompts], longer)
    found = [cache.fetch_nearest_cache("m", tokens) for tokens in longer]
    assert all(len(rest) <= 4 for _, rest in found)
    assert answers([one for one, _ in found], [rest for _, rest in found])[0] == expected


def test_kv_that_is_quantized_on_the_way_has_blocks_of_its_own():
    model = make_model("llama")
    cache = BlockPromptCache(model, block_size=SIZE)
    plain = make_prompt_cache(model)
    logits = forward(model, plain, TOKENS[:30])
    decoded = decode(model, plain, logits[-1], 2)
    cache.insert_cache("m", TOKENS[:30] + decoded, plain)
    assert isinstance(cache.fetch_nearest_cache("m", [*TOKENS[:30], 3])[0][0], KVCache)
    longer = [filled(KVCache(), 60).to_quantized(group_size=32, bits=8)]
    cache.insert_cache("m", TOKENS, longer)
    found, rest = cache.fetch_nearest_cache("m", [*TOKENS, 3])
    assert rest == [3] and isinstance(found[0], QuantizedKVCache) and found[0].bits == 8
    cache.check()
