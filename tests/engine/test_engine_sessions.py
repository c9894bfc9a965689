"""Sessions of an engine's prompts: an eviction policy is told when requests begin and pause, and what time it is."""

from dataclasses import replace

import pytest

from engine.small_models import EVEN, random_tokens, random_weights
from kvblocks.engine import Engine, LoadedModel
from kvblocks.errors import InvalidArgumentError
from kvblocks.retention.policies.lru import LRU


class Listener:
    """LRU that notes what it is told of sessions."""

    def __init__(self, cache):
        self.cache = cache
        self.lru = LRU(cache)
        self.use, self.remove, self.victim = self.lru.use, self.lru.remove, self.lru.victim
        self.told = []
        self.times = set()

    def free(self, blocks):
        self.told.append(("free", {block.session for block in blocks}))
        self.lru.free(blocks)

    def begin(self, session, tenant):
        self.times.add(self.cache.now)
        self.told.append(("begin", session, tenant))

    def pause(self, session, tenant, reason):
        self.told.append(("pause", session, tenant, reason))


@pytest.fixture(scope="module")
def model():
    config = replace(EVEN, tie_word_embeddings=False)
    return LoadedModel(config, random_weights(config))


def test_a_policy_hears_of_sessions(model):
    made = []

    def make(cache):
        made.append(Listener(cache))
        return made[-1]

    engine = Engine(model, num_blocks=64, eviction=make)
    prompt = random_tokens(model.config, 40, seed=1)
    (first,) = engine.generate([prompt], max_tokens=2, ignore_eos=True, session="chat", salt="mine")
    assert first.finish_reason == "length"
    engine.generate([prompt], max_tokens=2, ignore_eos=True)
    (generation,) = engine.submit(prompt, session=("another", 1))
    engine.step()
    engine.cancel(generation)
    (policy,) = made
    assert policy.told == [
        ("begin", "chat", "mine"),
        ("free", {"chat"}),
        ("pause", "chat", "mine", "length"),
        ("free", {None}),
        ("begin", ("another", 1), None),
        ("free", {("another", 1)}),
        ("pause", ("another", 1), None, "cancelled"),
    ]
    assert len(policy.times) == 2
    assert min(policy.times) > 0
    assert engine.manager.stats.num_eviction_failures == 0


def test_a_policy_hears_the_name_that_a_caller_has_for_stop(model):
    made, named = [], []

    def make(cache):
        made.append(Listener(cache))
        return made[-1]

    def name_stop(token_ids):
        named.append(token_ids)
        return "tool_calls"

    engine = Engine(model, num_blocks=64, eviction=make)
    prompt = random_tokens(model.config, 40, seed=1)
    (plain,) = engine.generate([prompt], max_tokens=3, ignore_eos=True, name_stop=name_stop, session="cut")
    options = {"max_tokens": 9, "ignore_eos": True, "stop_token_ids": plain.token_ids[2:], "name_stop": name_stop}
    engine.generate([prompt], n=2, session="chat", **options)
    engine.generate([prompt], **options)  # nobody asks why an answer without a session stopped
    reasons = [told[1::2] for told in made[0].told if told[0] == "pause"]
    assert reasons == [("cut", "length"), ("chat", "tool_calls"), ("chat", "tool_calls")]
    assert named == [plain.token_ids[:2]] * 2
    with pytest.raises(InvalidArgumentError, match="name_stop: expected None or a function, got 5"):
        engine.generate([prompt], name_stop=5)


def test_an_engine_takes_a_policy_by_its_name(model):
    prompts = [random_tokens(model.config, 40, seed=seed) for seed in range(6)]
    plain = Engine(model, num_blocks=12).generate(prompts, max_tokens=4, ignore_eos=True)
    engine = Engine(model, num_blocks=12, eviction="sessions")
    for _ in range(2):
        for number, prompt in enumerate(prompts):
            (answer,) = engine.generate([prompt], max_tokens=4, ignore_eos=True, session=number)
            assert answer.token_ids == plain[number].token_ids
    assert engine.manager.stats.num_eviction_failures == 0
    assert engine.manager.stats.num_evicted_blocks > 0
    engine.manager.check()
    with pytest.raises(InvalidArgumentError, match=r"eviction: expected None, 'lru'.*'sessions'.*got 'nonsense'"):
        Engine(model, num_blocks=12, eviction="nonsense")


def test_a_session_that_is_none_is_refused(model):
    engine = Engine(model, num_blocks=12)
    with pytest.raises(InvalidArgumentError, match=r"prompts\[0\]: session: expected something hashable, got \[\]"):
        engine.generate([[1, 2, 3]], session=[])
    assert not engine.has_work
