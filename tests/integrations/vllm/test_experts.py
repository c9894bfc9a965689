"""`--enable-return-routed-experts` of vLLM 0.33, which looks for cached tokens' experts by the hashes of its pool."""

import pytest
from vllm.config import SpeculativeConfig

from bench.vllm.schedulers import LOOKS_AHEAD, Settings, make_scheduler, make_vllm_config, our_scheduler, own_scheduler
from integrations.vllm.configurations import SMALL, Configuration, small
from integrations.vllm.decisions import first_difference
from integrations.vllm.stand import BLOCK
from integrations.vllm.workload import Mix, make_asks
from kvblocks import Sequence, UnsupportedEngineError
from kvblocks.integrations.vllm.early import check_engine_config, check_scheduler

if not LOOKS_AHEAD:
    pytest.skip("vLLM 0.32 keeps experts otherwise: test_lifecycle", allow_module_level=True)

from integrations.vllm.experts import drive

NUM_REQUESTS = 120
SERVED = [
    Configuration("plain", Settings()),
    Configuration("salts", Settings(), Mix(num_salts=3)),
    Configuration("async", Settings(is_async=True)),
    Configuration("cached states", Settings(num_blocks=20_000, num_states=1, keeps_windows=True)),
    small("sync", Settings(num_blocks=SMALL)),
    small("async", Settings(num_blocks=SMALL, is_async=True)),
]


def config_with_experts(settings):
    config = make_vllm_config(settings)
    config.aux_output_config.enable_return_routed_experts = True
    return config


@pytest.mark.parametrize("configuration", SERVED, ids=lambda configuration: configuration.name)
def test_every_token_has_its_experts_and_all_decisions_are_vllms(configuration, seed):
    settings, asks = configuration.settings, make_asks(configuration.mix, seed, NUM_REQUESTS)
    decided = []
    for kind in (own_scheduler(settings), our_scheduler(settings)):
        scheduler = make_scheduler(settings, kind, config=config_with_experts(settings))
        decisions, rows, driver = drive(scheduler, settings, asks)
        decided.append(decisions)
        assert rows == {name: list(request.all_token_ids)[:-1] for name, request in driver.requests.items()}
    theirs, ours = decided
    assert theirs.num_cached > 0 and (theirs.num_preempted > 0) == (settings.num_blocks == SMALL)
    assert first_difference(theirs, ours) is None


def test_with_events_too_both_learn_of_all_blocks():
    settings = Settings(num_blocks=SMALL, has_events=True)
    asks = make_asks(Mix(400, 100), 0, 60)
    scheduler = make_scheduler(settings, our_scheduler(settings), config=config_with_experts(settings))
    told = []
    take = scheduler.kv_cache_manager.take_events
    scheduler.kv_cache_manager.take_events = lambda: told.extend(made := take()) or made
    _, rows, driver = drive(scheduler, settings, asks)
    plain = make_scheduler(settings, our_scheduler(settings), config=make_vllm_config(settings))
    expected = []
    take_plain = plain.kv_cache_manager.take_events
    plain.kv_cache_manager.take_events = lambda: expected.extend(made := take_plain()) or made
    type(driver)(plain, settings, asks).run()
    names = [[(type(event), *getattr(event, "block_hashes", ())) for event in events] for events in (told, expected)]
    assert names[0] == names[1] and len(told) > 50
    assert rows == {name: list(request.all_token_ids)[:-1] for name, request in driver.requests.items()}


def test_records_do_not_pile_up_where_nobody_asks():
    settings = Settings()
    scheduler = make_scheduler(settings, our_scheduler(settings), config=config_with_experts(settings))
    manager = scheduler.kv_cache_manager
    manager.manager.allocate_slots(Sequence("one", range(BLOCK)))
    manager.new_step_starts()
    assert manager.manager.take_events() == []


def test_hashes_that_kvblocks_does_not_have_are_refused(monkeypatch):
    settings = Settings(num_drafts=3, is_eagle=True)
    config = config_with_experts(settings)
    assert isinstance(config.speculative_config, SpeculativeConfig)
    with pytest.raises(UnsupportedEngineError, match=r"routed-experts with lookahead.*disable_lookahead_block_hashes"):
        check_engine_config(config)
    check_engine_config(config_with_experts(Settings()))
    config = config_with_experts(Settings())
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    check_engine_config(config)
    monkeypatch.delenv("PYTHONHASHSEED")
    with pytest.raises(UnsupportedEngineError, match=r"random seed.*set PYTHONHASHSEED"):
        check_engine_config(config)


def test_hashes_of_parts_of_blocks_are_refused():
    settings = Settings(windows=(64,))
    scheduler = make_scheduler(settings, own_scheduler(settings), config=config_with_experts(settings))
    check_scheduler(scheduler)
    scheduler.hash_block_size = settings.block_size // 2
    with pytest.raises(UnsupportedEngineError, match=r"of several block sizes.*--disable-hybrid-kv-cache-manager"):
        check_scheduler(scheduler)
