"""Engines that share a store: the same bits as computed ones, whatever the store does."""

import queue
import random
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine.small_models import GEMMA3, QWEN3, random_tokens, random_weights
from engine.tiers.test_engine_tiers import CONFIG, ask, empty_device, make, model, on_disk, prompts, settle, stats
from tiers.store.servers import proxied, running, wait_for
from tiers.store.test_store import keys_of

from kvblocks import Sequence
from kvblocks.engine import Engine, LoadedModel, StepLimits
from kvblocks.engine.errors import ForgetError
from kvblocks.engine.tiers.asked import ask_for
from kvblocks.engine.tiers.options import TierOptions
from kvblocks.engine.tiers.seeker import Seeker
from kvblocks.errors import InvalidArgumentError
from kvblocks.tiers.store import SharedStore

__all__ = ["make", "model"]  # fixtures

SECRET = b"sixteen bytes or more"
PATIENT = "?timeout_ms=20000&lookup_ms=20000"
HASTY = "?timeout_ms=300&lookup_ms=50"

pytestmark = pytest.mark.usefixtures("loads_whatever_is_there")


@pytest.fixture(scope="module")
def module_server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def server(module_server):
    with module_server.client() as client:
        client.flushall()
    return module_server


@pytest.fixture
def share(make, server):
    """Engines of one store, below other tiers if there are any."""

    def build(url=None, options=PATIENT, secret=None, above=(), **others):
        return make(tiers=[*above, TierOptions((url or server.url) + options, secret=secret)], **others)

    return build


def counted(engine):
    return engine.offload.traffic()[-1].place


def back(engine):
    """Wait until the engine's store answers again."""
    wait_for(lambda: not counted(engine).is_away)


def ask_until_in_time(engine, prompt):
    """The first answer for which the store was in time, which a hasty one isn't always on a busy machine."""
    for _ in range(40):
        back(engine)
        empty_device(engine)
        answer, logits = ask(engine, prompt)
        if answer.num_loaded_tokens.get("store"):
            break
    return answer, logits


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, SECRET])
def test_an_engine_that_never_saw_a_prompt_answers_with_its_prefix_loaded(share, make, secret):
    (prompt,) = prompts(1)
    plain, expected = ask(make(), prompt)
    one, other = share(secret=secret), share(secret=secret)
    ask(one, prompt)
    settle(one)
    answer, logits = ask(other, prompt)
    assert answer.token_ids == plain.token_ids and torch.equal(logits, expected)
    assert (answer.num_cached_tokens, answer.num_loaded_tokens) == (288, {"store": 288})
    settle(other)
    assert counted(other).num_written_blocks == 0, "it stores nothing that is there"
    again, _ = ask(other, prompt)
    assert again.num_loaded_tokens == {} and counted(other).num_lookups == 1, "the device has it: nobody asks"


def test_engines_of_another_secret_or_block_size_find_nothing(share):
    (prompt,) = prompts(1)
    one = share()
    ask(one, prompt)
    settle(one)
    for options in ({"secret": SECRET}, {"block_size": 32}):
        answer, _ = ask(share(**options), prompt)
        assert answer.num_loaded_tokens == {}


def test_what_is_nearer_is_not_loaded_from_the_store(share, tmp_path):
    (prompt,) = prompts(1)
    engine = share(above=["host:4MiB", on_disk(tmp_path)])
    ask(engine, prompt)
    empty_device(engine)
    again, _ = ask(engine, prompt)
    assert again.num_loaded_tokens == {"host": 288}
    assert counted(engine).num_lookups == 1, "for the first answer alone"


def test_a_longer_prompt_loads_what_the_store_has_of_it_and_stores_the_rest(share):
    (prompt,) = prompts(1)
    one, other = share(), share()
    ask(one, prompt)
    settle(one)
    longer = prompt + random_tokens(CONFIG, 60, seed=50)
    answer, _ = ask(other, longer)
    assert answer.num_loaded_tokens == {"store": 288}
    settle(other)
    third, _ = ask(share(), longer)
    assert third.num_loaded_tokens == {"store": 352} and third.token_ids == answer.token_ids


@pytest.mark.parametrize("config", [GEMMA3, QWEN3], ids=["gemma3", "qwen3"])
def test_windows_come_from_the_store_too(share, make, config):
    windowed = LoadedModel(replace(config, tie_word_embeddings=False), random_weights(config))
    prompt = random_tokens(config, 290, seed=5)
    plain, expected = ask(make(windowed, num_blocks=100, enable_prefix_caching=False), prompt)
    one = share(given=windowed, num_blocks=100)
    ask(one, prompt)
    settle(one)
    other = share(given=windowed, num_blocks=100, on_events=lambda events: None)
    answer, logits = ask(other, prompt)
    assert answer.token_ids == plain.token_ids and torch.equal(logits, expected)
    assert (answer.num_cached_tokens, answer.num_loaded_tokens) == (288, {"store": 288})
    settle(other)


def test_prompts_that_come_together_are_asked_for_together_and_loaded_once(share):
    (prompt,) = prompts(1)
    one, other = share(), share(num_blocks=200)
    ask(one, prompt)
    settle(one)
    asked = [prompt + random_tokens(CONFIG, 5, seed=seed) for seed in range(6)]
    completions = other.generate(asked, max_tokens=3)
    assert [completion.token_ids for completion in completions] == [
        ask(share(), each)[0].token_ids[:3] for each in asked
    ]
    assert stats(other, "store").num_loaded_blocks == 18
    assert sum(completion.num_computed_tokens for completion in completions) < 300


def test_events_say_what_is_known_of_the_store(share):
    (prompt,) = prompts(1)
    one, events = share(), []
    ask(one, prompt)
    settle(one)
    other = share(on_events=events.extend)
    ask(other, prompt)
    media = {event.medium for event in events if hasattr(event, "token_ids")}
    assert "EXTERNAL" in media


# --- faults ----------------------------------------------------------------------------------------------------------


def asked_for(chooser, number):
    """Prompts that share beginnings, some of them long enough to be stored at once."""
    shared = prompts(3)
    return [
        shared[chooser.randrange(3)][: chooser.choice([270, 289, 300])]
        + random_tokens(CONFIG, 1 + chooser.randrange(30), seed=chooser.randrange(8))
        for _ in range(number)
    ]


@pytest.mark.every(3)
@pytest.mark.parametrize("seed", range(4))
def test_answers_over_a_store_that_fails_are_those_without_one(share, make, server, seed):
    """Answers are delayed, cut, damaged; the store hangs, refuses, is flushed, forgets one block in two."""
    chooser = random.Random(seed)
    asked = asked_for(chooser, 10)
    plain = make(num_blocks=80, enable_prefix_caching=False)
    expected = [plain.generate([prompt], max_tokens=3)[0].token_ids for prompt in asked]
    num_loaded = 0
    with proxied(server, seed) as proxy, server.client() as client:
        for turn in range(5):
            engine = share(proxy.url, HASTY, num_blocks=60, secret=SECRET if seed % 2 else None)
            engine.limits = StepLimits(96, 6)
            for _ in range(3):
                proxy.cuts, proxy.corrupts = chooser.choice([(0.0, 0.0), (0.05, 0.0), (0.0, 0.1)])
                proxy.piece, proxy.delay_s = chooser.choice([(65536, 0.0), (4096, 0.001), (1000, 0.005)])
                proxy.hangs, proxy.refuses = chooser.choice([(False, False)] * 4 + [(True, False), (False, True)])
                if not turn:
                    proxy.cuts = proxy.corrupts = proxy.delay_s = 0.0
                    proxy.hangs = proxy.refuses = False
                damage = chooser.choice(["nothing", "flush", "evict", "plant"]) if turn else "nothing"
                for key in client.keys("kvblocks:*"):
                    if damage == "flush" or (damage == "evict" and chooser.random() < 0.5):
                        client.delete(key)
                    elif damage == "plant" and chooser.random() < 0.5:
                        value = bytearray(client.get(key) or bytes(200))
                        value[chooser.randrange(len(value))] ^= 1 << chooser.randrange(8)
                        client.set(key, bytes(value))
                completions = engine.generate(asked, max_tokens=3)
                assert [completion.token_ids for completion in completions] == expected
                num_loaded += sum(sum(completion.num_loaded_tokens.values()) for completion in completions)
                engine.manager.check()
                settle(engine)
            proxy.hangs = proxy.refuses = False
            proxy.cut_all()
            engine.close()
            assert engine.manager.num_free_blocks == 60
    assert num_loaded, "nothing of this went through the store"


def test_a_store_that_is_not_there_costs_hits_alone(make):
    (prompt,) = prompts(1)
    plain, expected = ask(make(), prompt)
    engine = make(tiers=["valkey://127.0.0.1:1" + HASTY])
    for _ in range(2):
        answer, logits = ask(engine, prompt)
        assert answer.token_ids == plain.token_ids and torch.equal(logits, expected)
        empty_device(engine)
    assert counted(engine).is_away and counted(engine).num_failures


@pytest.mark.parametrize("when", ["before the lookup", "before the load"])
def test_a_store_that_hangs_lets_prompts_be_computed(share, server, when, monkeypatch):
    (prompt,) = prompts(1)
    with proxied(server) as proxy:
        one, other = share(), share(proxy.url, HASTY)
        first, expected = ask(one, prompt)
        settle(one)
        back(other)
        if when == "before the lookup":
            proxy.hangs = True
        else:
            seek = other.offload.seek

            def seek_and_hang(scheduler):
                was_seeking = other.offload.is_seeking
                seek(scheduler)
                proxy.hangs = proxy.hangs or (was_seeking and not other.offload.is_seeking)

            monkeypatch.setattr(other.offload, "seek", seek_and_hang)
        answer, logits = ask(other, prompt)
        assert answer.token_ids == first.token_ids and torch.equal(logits, expected)
        assert answer.num_loaded_tokens.get("store", 0) == 0 and answer.num_cached_tokens == 0
        wait_for(lambda: counted(other).is_away)
        settle(other)
        assert other.manager.num_free_blocks == other.manager.num_blocks, "no transfer holds anything"
        monkeypatch.undo()
        proxy.hangs = False
        again, logits = ask_until_in_time(other, prompt)
        assert again.num_loaded_tokens == {"store": 288} and torch.equal(logits, expected)


def test_a_prompt_waits_for_no_lookup_that_is_late(share, monkeypatch):
    """Even while the seeker's thread is busy."""
    (prompt,) = prompts(1)
    one, other = share(), share(options=HASTY)
    first, expected = ask(one, prompt)
    settle(one)
    gate, find = threading.Event(), SharedStore.find

    def find_late(store, asked):
        gate.wait(60)
        return find(store, asked)

    monkeypatch.setattr(SharedStore, "find", find_late)
    answer, logits = ask(other, prompt)
    gate.set()
    assert answer.token_ids == first.token_ids and torch.equal(logits, expected)
    assert answer.num_loaded_tokens == {}
    monkeypatch.undo()
    wait_for(lambda: counted(other).num_lookups)
    assert ask_until_in_time(other, prompt)[0].num_loaded_tokens == {"store": 288}, "what came too late changed nothing"


def test_a_prompt_whose_blocks_are_gone_since_it_was_looked_up_is_computed(share, server, monkeypatch):
    (prompt,) = prompts(1)
    one, other = share(), share()
    first, expected = ask(one, prompt)
    settle(one)
    seek = other.offload.seek

    def seek_and_flush(scheduler):
        was_seeking = other.offload.is_seeking
        seek(scheduler)
        if was_seeking and not other.offload.is_seeking:
            server.client().flushall()

    monkeypatch.setattr(other.offload, "seek", seek_and_flush)
    answer, logits = ask(other, prompt)
    assert answer.token_ids == first.token_ids and torch.equal(logits, expected)
    assert sum(answer.num_loaded_tokens.values()) == 0 and counted(other).num_missing_blocks
    settle(other)
    assert counted(other).num_written_blocks == 19, "and stored again"


def damage_blocks(server, prompt, places):
    """Change a byte of some of a prompt's blocks, as a broken memory would. Return their keys."""
    digests = ask_for(Sequence("damaged", prompt), 16, 0).digests()
    with server.client() as client:
        keys = [key for place in places for key in client.keys(f"*:{digests[place].hex()}")]
        for key in keys:
            value = bytearray(client.get(key))
            value[-1] ^= 1
            client.set(key, bytes(value))
        return keys


@pytest.mark.parametrize("places", [[0], [7, 17], range(18)], ids=["the first", "two", "all"])
@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_damaged_value_costs_its_prefix_one_hit_for_all_servers_together(share, server, secret, places):
    (prompt,) = prompts(1)
    one, other, third = (share(secret=secret) for _ in range(3))
    first, expected = ask(one, prompt)
    settle(one)
    damaged = damage_blocks(server, prompt, places)
    answer, logits = ask(other, prompt)
    assert answer.token_ids == first.token_ids and torch.equal(logits, expected)
    assert counted(other).num_damaged_blocks and answer.num_loaded_tokens.get("store", 0) < 288
    settle(other)
    assert counted(other).num_written_blocks == len(places), "it deleted the bad values, and wrote these blocks again"
    assert server.client().exists(*damaged) == len(places)
    answer, logits = ask(third, prompt)
    assert answer.num_loaded_tokens == {"store": 288} and torch.equal(logits, expected)
    assert counted(third).num_damaged_blocks == 0


# --- tenants ---------------------------------------------------------------------------------------------------------


def test_salts_do_not_meet_and_one_of_them_is_deleted_everywhere(share, server):
    (prompt,) = prompts(1)
    one, other = share(), share()
    for salt in ("ann", "bob"):
        ask(one, prompt, salt=salt)
        settle(one)
    assert ask(other, prompt)[0].num_loaded_tokens == {}
    assert ask(other, prompt, salt="ann")[0].num_loaded_tokens == {"store": 288}
    settle(other)
    other.forget_salt("ann")
    assert ask(share(), prompt, salt="ann")[0].num_loaded_tokens == {}
    assert ask(share(), prompt, salt="bob")[0].num_loaded_tokens == {"store": 288}
    assert server.client().dbsize()


def test_a_deletion_that_the_store_did_not_do_raises(share, server):
    (prompt,) = prompts(1)
    with proxied(server) as proxy:
        engine = share(proxy.url, HASTY)
        back(engine)
        ask(engine, prompt, salt="ann")
        settle(engine)
        proxy.refuses = True
        proxy.cut_all()
        with pytest.raises(ForgetError, match="some that are left, though nothing finds them any more: store: "):
            engine.forget_salt("ann")
        proxy.refuses = False
        back(engine)
        assert ask(engine, prompt, salt="ann")[0].num_loaded_tokens == {}, "it is to be deleted still"
        engine.forget_salt("ann")
        assert not keys_of(server)


def test_a_tenant_keeps_no_more_in_the_store_than_its_quota(share, server):
    engines = [share(num_blocks=60) for _ in range(2)]
    for number, engine in enumerate(engines):
        engine.manager.tiers.set_quota("store", "ann", 20)
        for prompt in prompts(3, seed=1 + 10 * number):
            ask(engine, prompt, salt="ann")
            settle(engine)
    blocks = [key for key in server.client().keys("*") if not key.endswith(b":q")]
    assert 0 < len(blocks) <= 20


def test_a_reset_deletes_what_the_model_has_in_the_store(share, server):
    """After a reset all of the model's blocks may be bad, so other servers must not load them."""
    (prompt,) = prompts(1)
    engine = share()
    ask(engine, prompt)
    settle(engine)
    assert server.client().dbsize()
    engine.manager.reset_prefix_cache()
    answer, _ = ask(engine, random_tokens(CONFIG, 40, seed=9))
    wait_for(lambda: not keys_of(server))
    again, _ = ask(engine, prompt)
    assert again.num_loaded_tokens == {} and answer.num_loaded_tokens == {}


def test_a_store_that_was_begun_before_a_reset_leaves_nothing_behind(share, server, monkeypatch):
    """The deletion follows the store, also if the store had begun to write."""
    first, second = prompts(2)
    engine = share()
    claims, has_begun, may_go_on = SharedStore._claim, threading.Event(), threading.Event()  # noqa: SLF001

    def slow_claim(self, *given):
        has_begun.set()
        assert may_go_on.wait(60)
        return claims(self, *given)

    monkeypatch.setattr(SharedStore, "_claim", slow_claim)
    ask(engine, first)
    wait_for(has_begun.is_set)
    ask(engine, second)  # which is queued behind it
    engine.manager.reset_prefix_cache()
    engine.step()
    time.sleep(0.3)  # a deletion that didn't wait would be over
    may_go_on.set()
    settle(engine)  # all stores have ended
    wait_for(lambda: not keys_of(server))


def test_an_engine_that_ends_before_it_could_delete_says_so(share, caplog):
    engine = share()
    engine.manager.reset_prefix_cache()
    engine.close()
    assert "blocks that a reset gave up aren't deleted from the store" in caplog.text


# --- bad input, and the end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("valkey:host", {}, "store: expected a URL"),
        ("valkey://host", {"secret": b"short"}, "tiers: valkey: secret: expected at least 16 bytes, got 5"),
        ("valkey://host", {"size": "8GiB"}, "tiers: valkey: expected no size, got '8GiB'"),
    ],
)
def test_options_that_cannot_be_are_refused(model, url, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Engine(model, num_blocks=4, tiers=[TierOptions(url, **options)])


def test_two_stores_are_refused_and_closed(model, server):
    before = threading.active_count()
    with pytest.raises(InvalidArgumentError, match="tiers: expected at most one store that servers share"):
        Engine(model, num_blocks=4, tiers=[server.url, server.url])
    wait_for(lambda: threading.active_count() <= before)


def test_options_do_not_show_what_is_secret():
    assert "hidden" not in repr(TierOptions("valkey://ann:hidden@host", secret=b"hidden" * 3))


def test_an_engine_that_is_closed_leaves_no_thread(share):
    before = threading.active_count()
    engine = share()
    ask(engine, prompts(1)[0])
    engine.close()
    wait_for(lambda: threading.active_count() <= before)


def test_a_store_is_asked_for_a_prompt_once_however_long_it_waits(share):
    engine = share(num_blocks=24)
    asked = prompts(4)
    engine.generate(asked, max_tokens=2)
    assert counted(engine).num_lookups <= 4
    sequence = Sequence("new", asked[0])
    assert engine.manager.tiers.find(engine.manager.get_computed_blocks(sequence)) is not None


def test_who_asks_for_scores_of_a_prompt_waits_for_no_lookup(share):
    (prompt,) = prompts(1)
    one, other = share(), share()
    ask(one, prompt)
    settle(one)
    (scored,) = other.generate([prompt], max_tokens=2, prompt_logprobs=1)
    assert counted(other).num_lookups == 0 and scored.num_loaded_tokens == {}
    assert len(scored.prompt_logprobs) == len(prompt)


def test_no_prompt_joins_a_batch_that_is_long_enough():
    seeker = object.__new__(Seeker)  # without a thread that would take them
    seeker._queue, seeker._num_columns = queue.SimpleQueue(), 1
    seeker._must_delete, seeker._deletion = False, None
    seeker._store = SimpleNamespace(seconds_to_probe=lambda: 0.0)
    searches = [SimpleNamespace(asked=SimpleNamespace(num_blocks=300)) for _ in range(5)]
    for search in searches:
        seeker._queue.put(search)
    assert [seeker._next(), seeker._next(), seeker._next()] == [searches[:2], searches[2:4], searches[4:]]
