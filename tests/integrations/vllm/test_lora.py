"""LoRA: whose KV is whose, and an adapter that is loaded anew never hits the KV of its former weights."""

import inspect

import pytest
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine import core
from vllm.v1.engine.core import EngineCoreProc

from bench.vllm.schedulers import Settings, make_vllm_config
from integrations.vllm.stand import BLOCK, WHOSE, Stand, adapter, request
from kvblocks.integrations.vllm import uninstall
from kvblocks.integrations.vllm.sequences import LORA_VERSIONS

PROMPT = range(100, 100 + 4 * BLOCK)
ALL = 3 * BLOCK


class Executor:
    """What an engine core hands its adapters to."""

    def add_lora(self, lora_request):
        return True

    def remove_lora(self, lora_id):
        return True


def make_stand(settings=None):
    settings = settings or Settings()
    config = make_vllm_config(settings)
    config.lora_config = LoRAConfig(max_loras=4)
    return Stand(settings, config=config)


@pytest.fixture
def engine_core(monkeypatch):
    """An engine core, for its calls about adapters. It forgets what it was told of them before."""
    monkeypatch.setattr(LORA_VERSIONS, "_versions", {})
    monkeypatch.setattr(LORA_VERSIONS, "_ids", {})
    monkeypatch.setattr(LORA_VERSIONS, "_announced", set())
    engine_core = object.__new__(core.EngineCore)
    engine_core.model_executor = Executor()
    yield engine_core
    uninstall()


def test_an_adapters_kv_is_its_own(engine_core):
    stand = make_stand()
    assert stand.cached(request("a", PROMPT, lora_request=adapter("a"))) == 0
    assert stand.cached(request("none", PROMPT)) == 0
    assert stand.cached(request("name", PROMPT, lora_request=adapter("b", 2))) == 0
    assert stand.cached(request("path", PROMPT, lora_request=adapter("a", 1, "/adapters/other"))) == 0
    assert stand.cached(request("same", PROMPT, lora_request=adapter("a"))) == ALL


def test_an_adapter_reloaded_in_place_hits_nothing_of_the_old_one(engine_core):
    stand = make_stand()
    engine_core.add_lora(adapter())
    stand.cached(request("old", PROMPT, lora_request=adapter()))
    assert stand.cached(request("same", PROMPT, lora_request=adapter())) == ALL
    assert engine_core.add_lora(adapter()) is True  # loaded already: nothing changes
    assert stand.cached(request("touched", PROMPT, lora_request=adapter())) == ALL
    engine_core.add_lora(adapter(load_inplace=True))
    assert stand.cached(request("new", PROMPT, lora_request=adapter())) == 0
    assert stand.cached(request("again", PROMPT, lora_request=adapter())) == ALL


def test_requests_of_vllms_server_carry_the_flag_of_the_last_reload_and_share(engine_core):
    """The server keeps what it announced, flag and all, and hands it on with each request."""
    stand = make_stand()
    engine_core.add_lora(adapter(load_inplace=True))
    stand.cached(request("first", PROMPT, lora_request=adapter(load_inplace=True)))
    assert stand.cached(request("second", PROMPT, lora_request=adapter(load_inplace=True))) == ALL
    engine_core.add_lora(adapter(load_inplace=True))
    assert stand.cached(request("third", PROMPT, lora_request=adapter(load_inplace=True))) == 0


def test_a_request_that_asks_for_a_reload_by_itself_shares_with_nobody_before(engine_core):
    """Nobody announces it: vLLM's workers load the adapter again with the step that the request is in."""
    stand = make_stand()
    stand.cached(request("old", PROMPT, lora_request=adapter()))
    assert stand.cached(request("reloads", PROMPT, lora_request=adapter(load_inplace=True))) == 0
    assert stand.cached(request("reloads too", PROMPT, lora_request=adapter(load_inplace=True))) == 0
    assert stand.cached(request("new", PROMPT, lora_request=adapter())) == ALL  # of the last load


def test_an_adapter_that_was_removed_is_another_one_when_it_comes_again(engine_core):
    stand = make_stand()
    stand.cached(request("old", PROMPT, lora_request=adapter()))
    assert engine_core.remove_lora(2) is True
    assert stand.cached(request("same", PROMPT, lora_request=adapter())) == ALL
    engine_core.remove_lora(1)
    assert stand.cached(request("new", PROMPT, lora_request=adapter())) == 0


def test_an_adapter_announced_under_another_number_is_another_one(engine_core):
    """As vLLM's server numbers an adapter that is unloaded and loaded again under its name."""
    stand = make_stand()
    engine_core.add_lora(adapter("a", 1))
    stand.cached(request("old", PROMPT, lora_request=adapter("a", 1)))
    engine_core.add_lora(adapter("a", 2))
    assert stand.cached(request("new", PROMPT, lora_request=adapter("a", 2))) == 0


def test_a_request_that_waits_during_a_reload_is_looked_up_anew(engine_core):
    stand = make_stand(Settings(num_blocks=14))
    stand.cached(request("old", PROMPT, lora_request=adapter()))
    stand.add(request("runs", range(1000, 1000 + 9 * BLOCK), 3))
    stand.step()
    stand.add(request("waits", PROMPT, lora_request=adapter()))
    assert "waits" not in stand.step().num_scheduled_tokens  # looked up, and no room
    engine_core.add_lora(adapter(load_inplace=True))
    stand.run_all()
    assert stand.result.cached["waits"] == 0


def test_a_request_preempted_before_a_reload_is_computed_anew_after_it(engine_core):
    stand = make_stand(Settings(reserves_full_prompt=False))
    runs = stand.add(request("runs", PROMPT, 6, lora_request=adapter()))
    stand.step()
    stand.preempt(runs)
    engine_core.add_lora(adapter(load_inplace=True))
    assert stand.step().num_scheduled_tokens == {"runs": len(PROMPT) + 1}
    stand.run_all()
    assert stand.cached(request("same", PROMPT, lora_request=adapter())) == ALL


def test_what_a_running_request_caches_after_a_reload_is_hit_by_nobody(engine_core):
    stand = make_stand()
    runs = stand.add(request("runs", PROMPT, 3 * BLOCK, lora_request=adapter()))
    stand.step()
    engine_core.add_lora(adapter(load_inplace=True))
    stand.run_all()
    assert stand.cached(request("same", runs.all_token_ids, lora_request=adapter())) == 0


def test_the_engine_core_still_decodes_a_callers_adapter(engine_core):
    """An engine core in its own process gets lists, and decodes them by the signatures of its calls."""
    make_stand()
    assert core.EngineCore.add_lora is not inspect.unwrap(core.EngineCore.add_lora)
    (decoded,) = EngineCoreProc._convert_msgspec_args(engine_core.add_lora, [["a", 1, "/adapters/a", None, True]])  # noqa: SLF001
    assert decoded == adapter() and isinstance(decoded, LoRARequest) and decoded.load_inplace


def test_nothing_is_replaced_without_adapters_and_all_is_given_back():
    names = ("add_lora", "remove_lora")
    before = [core.EngineCore.__dict__[name] for name in names]
    Stand(Settings())
    assert [core.EngineCore.__dict__[name] for name in names] == before
    make_stand()
    make_stand()
    assert [core.EngineCore.__dict__[name] for name in names] != before
    uninstall()
    assert [core.EngineCore.__dict__[name] for name in names] == before
    uninstall()


@pytest.mark.parametrize("whose", WHOSE[:1])
def test_vllm_itself_hits_the_old_adapter(whose):
    """vLLM warns of it: load changed weights from a new path."""
    stand = Stand(Settings(), whose)
    stand.cached(request("old", PROMPT, lora_request=adapter()))
    assert stand.cached(request("new", PROMPT, lora_request=adapter(load_inplace=True))) == ALL
