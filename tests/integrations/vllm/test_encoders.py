"""Encoder-decoder models (Whisper): blocks of cross attention, held from the encoder's step to the request's end."""

from dataclasses import replace
from random import Random

import pytest
import torch
from vllm.v1.core.encoder_cache_manager import EncoderDecoderCacheManager
from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from bench.vllm.schedulers import Settings, as_engine, make_scheduler, make_vllm_config, our_scheduler, own_scheduler
from integrations.vllm.decisions import Driver, first_difference
from integrations.vllm.stand import BLOCK, image, request
from integrations.vllm.worker import Chain, Worker, WrongReadError
from integrations.vllm.workload import Mix, make_asks
from kvblocks import UnsupportedEngineError

NUM_ENCODER_TOKENS = 100_000
SHAPE = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE, block_size=BLOCK)
CROSS = CrossAttentionSpec(**SHAPE, block_size=BLOCK)


class DecoderChain(Chain):
    """What a decoder's slots must hold: the encoder's input is no part of its tokens."""

    def values_up_to(self, drafts):
        assert not drafts
        self._extend(self.values, self.request.all_token_ids[len(self.values) :])
        return list(self.values)


class EncoderWorker(Worker):
    """Writes each encoder's states in the request's first step, and reads them in each. group: of cross attention."""

    def __init__(self, settings, group):
        super().__init__(settings)
        self.num_groups = 2
        self.group = group

    def execute(self, step, requests):
        for name, tables in step.tables.items():
            self._chains.setdefault(name, DecoderChain(requests[name], self._contexts))
            (sound,) = requests[name].mm_features
            assert len(tables[self.group]) == -(-sound.mm_position.length // BLOCK)
            for block_id in tables[self.group]:
                if step.starts[name] == 0:
                    self._memory[block_id] = ["encoder", name]
        own = {name: [tables[1 - self.group]] for name, tables in step.tables.items()}
        accepted = super().execute(replace(step, tables=own), requests)
        for name, tables in step.tables.items():
            if any(self._memory.get(block_id) != ["encoder", name] for block_id in tables[self.group]):
                raise WrongReadError(f"{name}: another request wrote to its encoder's states")
        return accepted


class EncoderDriver(Driver):
    """Takes requests with an encoder's input each through a scheduler."""

    def __init__(self, settings, kind, specs, asks=()):
        groups = as_engine(make_vllm_config(settings), specs)
        super().__init__(make_scheduler(settings, kind, groups=groups), settings, asks)
        self.scheduler.is_encoder_decoder = True  # the model in our configuration isn't
        self.scheduler.max_num_encoder_input_tokens = NUM_ENCODER_TOKENS
        self.scheduler.encoder_cache_manager = EncoderDecoderCacheManager(NUM_ENCODER_TOKENS)
        self.worker = EncoderWorker(settings, specs.index(CROSS))
        self.random = Random(1)

    def _add(self, ask):
        sound = image(ask.request_id, 0, self.random.randrange(1, 500))
        made = request(ask.request_id, ask.prompt, ask.max_tokens, mm_features=[sound])
        self.requests[ask.request_id] = made
        self.result.tokens[ask.request_id] = []
        self.scheduler.add_request(made)


@pytest.mark.parametrize(
    ("num_blocks", "is_async", "specs"),
    [
        (4000, False, [FULL, CROSS]),
        (4000, True, [CROSS, FULL]),
        (121, False, [CROSS, FULL]),
        (121, True, [FULL, CROSS]),
    ],
    ids=["plain", "async", "120 blocks", "120 blocks, async"],
)
def test_all_decisions_are_vllms(num_blocks, is_async, specs, seed):
    settings = Settings(num_blocks=num_blocks, is_async=is_async, has_caching=False)
    asks = make_asks(Mix(longest=400, most_output=100, share_cancelled=0.1), seed, 100)
    theirs = EncoderDriver(settings, own_scheduler(settings), specs, asks).run()
    ours = EncoderDriver(settings, our_scheduler(settings), specs, asks).run()
    assert first_difference(theirs, ours) is None
    assert (theirs.num_preempted > 0) == (num_blocks < 200)


def test_a_request_without_room_for_both_gets_neither():
    settings = Settings(num_blocks=11, has_caching=False)
    driver = EncoderDriver(settings, our_scheduler(settings), [FULL, CROSS])
    manager = driver.scheduler.kv_cache_manager
    for name, num_tokens, num_encoder_tokens in (("both", 5 * BLOCK, 6 * BLOCK), ("encoder", 1, 11 * BLOCK)):
        made = request(name, range(num_tokens), mm_features=[image("a", 0, 1)])
        assert manager.allocate_slots(made, num_tokens, num_encoder_tokens=num_encoder_tokens) is None
        assert manager.usage == 0 and manager.get_block_ids(name) == ([], [])
    made = request("fits", range(5 * BLOCK - 4), mm_features=[image("a", 0, 1)])
    given = manager.allocate_slots(made, 5 * BLOCK - 4, num_encoder_tokens=5 * BLOCK)
    ids = given.get_block_ids()
    assert manager.get_block_ids("fits") == ids and [len(table) for table in ids] == [5, 5]
    assert manager.get_block_ids_for_computed_tokens("fits", BLOCK) == (ids[0][:1], ids[1])
    tables = [record.req_to_blocks["fits"] for record in manager.coordinator.single_type_managers]
    assert [[block.block_id for block in table] for table in tables] == [*map(list, ids)]
    made.status = RequestStatus.RUNNING
    holds = manager.pop_blocks_for_free(made)
    assert manager.usage == 1 and manager.get_block_ids("fits") == ([], [])
    manager.block_pool.free_blocks(holds)
    assert manager.usage == 0


@pytest.mark.parametrize(
    ("specs", "has_caching"),
    [([FULL, CROSS], True), ([FULL, SlidingWindowSpec(**SHAPE, block_size=BLOCK, sliding_window=64), CROSS], False)],
    ids=["with caching", "with windows"],
)
def test_other_cross_attention_is_refused(specs, has_caching):
    settings = Settings(has_caching=has_caching)
    with pytest.raises(UnsupportedEngineError, match=r"CrossAttentionSpec in KV cache group .*without prefix caching"):
        EncoderDriver(settings, our_scheduler(settings), specs)
