"""The session gate before vLLM's waiting queue: `--additional-config '{"kvblocks_session_gate": true}'`."""

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from bench.vllm.schedulers import Settings, make_scheduler, make_vllm_config, our_scheduler
from integrations.vllm.configurations import CACHED_STATES, CACHED_STATES_SMALL, CONFIGURATIONS
from integrations.vllm.decisions import Driver, decide, first_difference
from integrations.vllm.stand import BLOCK, Stand, request
from integrations.vllm.workload import make_asks
from kvblocks import InvalidArgumentError
from kvblocks.integrations.vllm.early import check_engine_config

MODES = pytest.mark.parametrize("is_async", [False, True])
CACHING = [each for each in CONFIGURATIONS if each.settings.has_caching] + [CACHED_STATES[0], *CACHED_STATES_SMALL]
NUM_TOKENS = 20 * BLOCK


class Clock:
    """A clock that stands until a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def config_with(settings, value):
    config = make_vllm_config(settings)
    config.additional_config = {"kvblocks_session_gate": value}
    return config


def make_stand(value=NUM_TOKENS, **settings):
    """Return a stand with a gate on a clock of the test's, on which a token of a prompt takes a second."""
    made = Settings(**settings)
    stand = Stand(made, config=config_with(made, value))
    entrance = stand.scheduler.entrance
    stand.clock = entrance.clock = Clock()
    entrance.rounds.seconds_per_token, entrance.min_step_tokens = 1.0, 1 << 30
    return stand


def prompt(first, num_blocks):
    return [first + number % 50 for number in range(num_blocks * BLOCK)]


def why(stand, name):
    return stand.scheduler.entrance.gate.why(name)


@MODES
def test_a_session_without_room_waits_outside_of_the_queue_and_others_pass_it(is_async):
    stand = make_stand(is_async=is_async)
    stand.add(request("a", prompt(100, 15), 50, session_id="one"))
    stand.step()
    stand.add(request("b", prompt(200, 10), 3, session_id="two"))
    later = stand.add(request("c", prompt(300, 4), 3))
    stand.step()
    assert (why(stand, "b").reason, why(stand, "b").num_missing_tokens) == ("room", (15 + 4 + 10 - 19) * BLOCK)
    assert not stand.scheduler.waiting, "a request that the gate holds back would end the admissions of each step"
    assert later in stand.scheduler.running
    assert stand.scheduler.get_request_counts() == (2, 1)
    stand.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    while stand.scheduler.running:
        stand.step()
        stand.finish()
    stand.step()
    assert why(stand, "b").reason == "idle"
    assert stand.scheduler.has_requests(), "the engine would sleep, and nothing would wake it"
    stand.clock.now = why(stand, "b").until
    stand.run_all()
    assert len(stand.result.tokens["b"]) == 3


@MODES
def test_the_next_turn_of_a_session_inside_passes_those_that_wait(is_async):
    stand = make_stand(is_async=is_async)
    first = stand.add(request("a1", prompt(100, 15), 4, session_id="one"))
    stand.run_all()
    stand.finish()
    stand.add(request("b1", prompt(200, 10), 4, session_id="two"))
    stand.step()
    assert why(stand, "b1").reason == "idle"
    said = [*first.all_token_ids, *prompt(400, 1)]
    stand.add(request("a2", said, 4, session_id="one"))
    stand.step()
    stand.step()
    assert stand.result.cached["a2"] == 15 * BLOCK
    assert why(stand, "b1").reason == "room"
    stand.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    stand.finish()
    stand.clock.now += 1e6
    assert not stand.scheduler.entrance.held
    assert stand.scheduler.entrance.gate.stats.num_waiting_requests == 0
    assert not stand.scheduler.has_unfinished_requests()


def test_what_was_preempted_passes_the_gate_no_more():
    stand = make_stand()
    running = stand.add(request("a", prompt(100, 15), 50, session_id="one"))
    stand.step()
    stand.step()
    stand.add(request("b", prompt(200, 10), 3, session_id="two"))
    stand.preempt(running)
    assert running in stand.scheduler.waiting
    stand.step()
    assert running in stand.scheduler.running
    assert why(stand, "b").reason == "room"


def test_tenants_with_the_same_name_are_different_sessions_and_a_turn_of_a_stream_is_none():
    stand = make_stand()
    stand.add(request("a", prompt(100, 15), 50, session_id="one"))
    stand.step()
    stand.add(request("b", prompt(100, 10), 3, session_id="one", cache_salt="tenant"))
    stand.add(request("c", prompt(300, 2), 3, session_id="three", resumable=True))
    stand.step()
    assert [*stand.scheduler.entrance.held] == ["b"]


def test_nobody_is_let_in_while_the_scheduler_is_paused():
    stand = make_stand()
    stand.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    stand.add(request("a", prompt(100, 5), 3, session_id="one"))
    stand.step()
    assert [*stand.scheduler.entrance.held] == ["a"]
    assert not stand.scheduler.has_unfinished_requests()
    stand.scheduler.set_pause_state(PauseState.UNPAUSED)
    stand.run_all()
    assert len(stand.result.tokens["a"]) == 3


def test_the_room_is_the_pool_or_what_is_said():
    assert make_stand(True, num_blocks=401).scheduler.entrance.gate.num_tokens == 400 * BLOCK
    assert make_stand(12345).scheduler.entrance.gate.num_tokens == 12345
    # A window of 64 tokens, beside full attention, takes few blocks, however long a prompt is.
    assert make_stand(True, num_blocks=401, windows=(64,)).scheduler.entrance.gate.num_tokens > 390 * BLOCK // 2


def test_a_state_takes_two_blocks_of_the_room_however_long_a_prompt_is():
    gate = make_stand(True, num_blocks=401, num_states=1, max_model_len=100 * BLOCK).scheduler.entrance.gate
    assert gate.num_tokens == 400 * BLOCK * 100 // 102


def test_a_session_of_a_model_with_states_goes_on_from_its_last_state():
    """What the gate counts as cached is what a lookup finds: up to the last state."""
    stand = make_stand(num_states=1)
    first = stand.add(request("a1", prompt(100, 15), 4, session_id="one"))
    stand.run_all()
    stand.add(request("b1", prompt(200, 10), 4, session_id="two"))
    stand.step()
    assert why(stand, "b1").reason == "idle"
    said = stand.add(request("a2", [*first.all_token_ids, *prompt(400, 1)], 4, session_id="one"))
    assert stand.manager.num_cached(said) == 15 * BLOCK
    stand.step()
    stand.step()
    assert stand.result.cached["a2"] == 15 * BLOCK
    stand.clock.now += 1e6
    stand.run_all()
    assert len(stand.result.tokens["b1"]) == 4


def test_the_time_of_a_token_is_learned_from_steps_that_compute_prompts():
    stand = make_stand()
    entrance = stand.scheduler.entrance
    entrance.rounds.seconds_per_token, entrance.min_step_tokens = 0.0, BLOCK
    stand.add(request("a", prompt(100, 10), 5, session_id="one"))
    step = stand._schedule()  # noqa: SLF001
    stand.clock.now += 8.0
    stand._finish(step)  # noqa: SLF001
    assert entrance.rounds.seconds_per_token == 8.0 / (10 * BLOCK)
    step = stand._schedule()  # noqa: SLF001
    stand.clock.now += 5.0
    stand._finish(step)  # noqa: SLF001  a step of decodes alone
    assert entrance.rounds.seconds_per_token == 8.0 / (10 * BLOCK)


def with_sessions(asks, settings, config):
    """Return a driver of these requests, a fifth of them without a session."""
    driver = Driver(make_scheduler(settings, our_scheduler(settings), config=config), settings, asks)
    add = driver.scheduler.add_request

    def named(added):
        number = len(driver.requests)
        added.session_id = f"session {number % 6}" if number % 5 else None
        add(added)

    driver.scheduler.add_request = named
    return driver


@pytest.mark.parametrize("configuration", CACHING, ids=[each.name for each in CACHING])
def test_with_room_for_all_nothing_is_decided_otherwise(configuration, seed):
    asks = make_asks(configuration.mix, seed, 60)
    config = config_with(configuration.settings, 10_000_000)
    ours = with_sessions(asks, configuration.settings, config).run()
    plain = decide(configuration.settings, asks, our_scheduler(configuration.settings))
    assert first_difference(plain, ours) is None


@pytest.mark.parametrize("configuration", CACHING, ids=[each.name for each in CACHING])
def test_every_request_gets_its_answer_whatever_the_room(configuration, seed):
    """Answers are those without a gate, no block is lost, and no step reads what isn't there."""
    asks = make_asks(configuration.mix, seed, 60)
    plain = decide(configuration.settings, asks, our_scheduler(configuration.settings))
    driver = with_sessions(asks, configuration.settings, config_with(configuration.settings, 700))
    ours = driver.run()
    cancelled = {ask.request_id for ask in asks if ask.cancelled is not None}
    assert {name: tokens for name, tokens in ours.tokens.items() if name not in cancelled} == {
        name: tokens for name, tokens in plain.tokens.items() if name not in cancelled
    }
    stats = driver.scheduler.entrance.gate.stats
    assert stats.num_entries > 0
    assert stats.num_waiting_requests == stats.num_other_tokens == 0
    assert not driver.scheduler.entrance.held
    assert all(since is not None for *_, since in driver.scheduler.entrance.gate.members()), "one seems to run"


def test_without_the_option_there_is_no_gate():
    for value in (False, None):
        assert (
            make_scheduler(Settings(), our_scheduler(Settings()), config=config_with(Settings(), value)).entrance
            is None
        )
    assert Stand(Settings()).scheduler.entrance is None


@pytest.mark.parametrize("value", [0, -5, "yes", 1.5, [True]])
def test_a_wrong_option_is_refused_before_a_model_is_loaded(value):
    config = config_with(Settings(), value)
    with pytest.raises(InvalidArgumentError, match="kvblocks_session_gate: expected true, false or a number of tokens"):
        check_engine_config(config)
    with pytest.raises(InvalidArgumentError, match="expected true"):
        make_scheduler(Settings(), our_scheduler(Settings()), config=config)


def test_the_gate_needs_prefix_caching():
    with pytest.raises(InvalidArgumentError, match="expected prefix caching, got --no-enable-prefix-caching"):
        check_engine_config(config_with(Settings(has_caching=False), True))
