"""The demo on a tiny model: what it counts, what it says, and its JSON; and both commands of the command line."""

import io
import json
import sys

import pytest
from rich.console import Console

from kvblocks.cli import app as cli
from kvblocks.engine.completion import Completion
from kvblocks.engine.demo.demo import DemoCache, DemoReport, DemoRequest, run_demo
from kvblocks.engine.demo.script import HANDBOOK, SUPPORT_DESK, DemoScript
from kvblocks.engine.errors import ModelError
from kvblocks.engine.run.runner import LoadedModel
from kvblocks.engine.text.tokenizer import Tokenizer

SHORT_SCRIPT = DemoScript("You answer for a shop that sells kettles. " * 3, ("Is it in?", "How much?"), "And then?")


def test_the_demo_shares_what_can_be_shared(roomy_folder):
    model = LoadedModel.load(roomy_folder)
    screen = io.StringIO()
    report = run_demo(model, Console(file=screen, width=100), script=SHORT_SCRIPT, max_tokens=20)
    assert report.is_identical
    assert len(report.requests) == 3
    first, second, again = report.requests
    assert all(request.cold.num_cached_tokens == 0 for request in report.requests)
    assert first.warm.num_cached_tokens == 0  # what ran before it is not counted, nor left in the cache
    shared = len(model.tokenizer.encode(SHORT_SCRIPT.system_prompt))
    assert second.warm.num_cached_tokens >= shared // 16 * 16
    assert again.warm.num_cached_tokens >= (first.warm.num_prompt_tokens - 1) // 16 * 16
    for request in report.requests:
        num_tokens = request.warm.num_prompt_tokens + len(request.warm.token_ids) - 1
        assert request.cold.num_computed_tokens == num_tokens
        assert request.warm.num_computed_tokens == num_tokens - request.warm.num_cached_tokens
    shown = screen.getvalue()
    for text in ("> Is it in?", "> How much?", "> And then?", "customer 1 again", "identical: yes", "median x"):
        assert text in shown


def test_a_demo_whose_second_engine_caches_nothing_says_so(roomy_folder):
    screen = io.StringIO()
    cache = DemoCache(num_blocks=100, prefix_caching=False, eviction="slru")
    model = LoadedModel.load(roomy_folder)
    report = run_demo(model, Console(file=screen, width=100), script=SHORT_SCRIPT, max_tokens=2, cache=cache)
    assert report.is_identical
    assert all(request.warm.num_cached_tokens == 0 for request in report.requests)
    assert "Without -> without prefix caching, again" in screen.getvalue()


def make_completion(ttft_s, token_ids=(1, 2)):
    return Completion("ab", list(token_ids), 100, 96, 6, ttft_s, "length")


def test_the_ratio_is_the_median_over_all_but_the_first_and_differences_are_told():
    pairs = [(1.0, 1.0), (4.0, 1.0), (6.0, 1.0), (2.0, 1.0)]
    requests = tuple(DemoRequest("x", make_completion(a), make_completion(b)) for a, b in pairs)
    assert DemoReport(requests).ttft_speedup == 4.0
    assert DemoReport(requests).is_identical
    other = DemoRequest("x", make_completion(1.0), make_completion(1.0, (1, 3)))
    assert not DemoReport((*requests, other)).is_identical
    assert DemoReport((*requests, other)).to_json("m")["identical_output"] is False


def test_a_model_that_cannot_chat_is_refused(roomy_folder):
    model = LoadedModel.load(roomy_folder)
    with pytest.raises(ModelError, match="chat template, got one without"):
        run_demo(LoadedModel(model.config, model.weights), Console(file=io.StringIO()))


def run(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    captured = capsys.readouterr()
    return raised.value.code or 0, captured.out, captured.err


def test_the_command_prints_json_as_its_last_line(roomy_folder, capsys):
    code, output, error = run(["demo", "--json", "--model", str(roomy_folder)], capsys)
    assert code == 0
    assert "Without prefix caching" in error
    results = json.loads(output.splitlines()[-1])
    assert results.keys() == {"model", "block_size", "requests", "ttft_speedup", "identical_output", "restart"}
    assert results["restart"]["disk_tokens_after"] == results["restart"]["cached_tokens_after"] > 1000
    assert (results["model"], results["block_size"]) == (str(roomy_folder), 16)
    assert results["identical_output"] is True
    assert len(results["requests"]) == len(SUPPORT_DESK.questions) + 1
    for request in results["requests"][1:]:
        assert request["cached_tokens"] > 0.9 * request["prompt_tokens"]
        assert request["ttft_s_cold"] > 0
        assert request["ttft_s_warm"] > 0


def test_without_the_servers_packages_the_last_act_is_left_out(roomy_folder, capsys, monkeypatch):
    for name in ("kvblocks.cli.restart", "kvblocks.cli.client"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "httpx2", None)
    code, output, error = run(["demo", "--json", "--model", str(roomy_folder)], capsys)
    assert code == 0
    assert "kvblocks[engine,server]" in error.replace("\n", " ")
    assert "restart" not in json.loads(output.splitlines()[-1])


def test_generate_prints_the_answer(roomy_folder, capsys):
    code, output, _ = run(["generate", "hello", "--model", str(roomy_folder), "--max-tokens", "5"], capsys)
    assert code == 0
    assert output.endswith("\n")
    assert run(["generate", "hello", "--model", str(roomy_folder), "--max-tokens", "5"], capsys)[1] == output


@pytest.mark.parametrize("command", [["demo"], ["generate", "hello"]])
def test_a_model_that_is_not_there_is_one_line(command, capsys):
    code, output, error = run([*command, "--model", "/no/such/folder"], capsys)
    assert (
        error
        == "kvblocks: expected a known model (smollm2), a Hugging Face folder or a GGUF file, got '/no/such/folder'\n"
    )
    assert (code, output) == (2, "")


def uncached_tokens(completion):
    return completion.num_prompt_tokens - completion.num_cached_tokens


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_computes_much_less_and_answers_the_same(smollm2_folder):
    """The speedup isn't tested here but shown by `make demo`: times depend on the machine as much as on kvblocks."""
    report = run_demo(LoadedModel.load(smollm2_folder), Console(file=io.StringIO()), max_tokens=4)
    assert report.is_identical
    assert [request.warm.num_cached_tokens for request in report.requests] == [0, 1024, 1024, 1024, 1040]
    sharing = report.requests[1:]
    assert all(request.cold.num_prompt_tokens >= 8 * uncached_tokens(request.warm) for request in sharing)
    assert report.ttft_speedup > 0


@pytest.mark.model
def test_the_handbook_is_as_long_as_such_prompts_are(smollm2_folder):
    assert 1000 <= len(Tokenizer.from_folder(smollm2_folder).encode(HANDBOOK)) <= 1100
