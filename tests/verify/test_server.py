"""`kvblocks verify` against our own server: a right one passes, and each fault that is put into it is found."""

import json
import shutil
from dataclasses import replace

import pytest
from engine.hybrid_models import save_tiny
from server.server_harness import running_server, tiny_loaded
from tokenizers import Tokenizer, models, pre_tokenizers
from verify.played_adapters import PlayedAdapters
from verify.played_images import PlayedImages
from verify.proxy import proxy_of
from verify.server_faults import FAULTS, state_under_an_earlier_key

from kvblocks import Sequence
from kvblocks.cli import main
from kvblocks.engine import intake
from kvblocks.errors import InvalidArgumentError
from kvblocks.verify.server import Checkup, CheckupOptions, Target, TargetError
from kvblocks.verify.server.cases import CASES
from kvblocks.verify.server.page import as_html, as_text
from kvblocks.verify.server.patient import Patient
from kvblocks.verify.server.prompts import Words


@pytest.fixture(scope="module")
def model(roomy_folder, tmp_path_factory):
    """The tiny model with a tokenizer for which each word of the prompts is a token, as it is for real ones."""
    folder = tmp_path_factory.mktemp("words") / "tiny"
    shutil.copytree(roomy_folder, folder)
    return tiny_loaded(with_words(folder), 4096)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A tiny model with recurrent states."""
    return tiny_loaded(with_words(save_tiny(tmp_path_factory.mktemp("hybrid"), "lfm2", vocab_size=512)), 4096)


def with_words(folder):
    words = sorted({word for number in range(40) for word in Words(str(number)).draw(100)})
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(["[UNK]", *words])}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def check(url, only=None, seed="1", num_turns=1, **options):
    """Run each case so many times, or one of them. options: of the patient."""
    with Target(url) as target:
        checkup = Checkup(Patient(target, **options), CheckupOptions(seed=seed, only=only))
        checkup.run_turns(num_turns)
    return checkup


def test_a_right_server_passes_every_case(model, monkeypatch):
    """Its times are those of what it computes: on a busy machine, measured ones may differ by chance."""
    ask = Target.ask

    def ask_and_count(target, *given, **options):
        reply = ask(target, *given, **options)
        return replace(reply, seconds=0.001 * (reply.num_prompt_tokens - reply.num_cached_tokens))

    monkeypatch.setattr(Target, "ask", ask_and_count)
    with running_server(model, cache={"num_blocks": 2000}) as server:
        checkup = check(server.url)
        server.wait_until_idle()
    assert checkup.findings == []
    assert set(checkup.num_tries) == set(CASES) - set(checkup.not_tried)
    assert checkup.not_tried == ["adapters", "reloads", "images"]
    assert "Not tried with this server: adapters, reloads, images." in as_text(checkup)
    assert checkup.patient.coldness.by == "salt"
    assert "No fault was found." in as_text(checkup)
    assert checkup.patient.measured["timing"].startswith("prompts of another salt saved 0% of the time")
    assert server.service.metrics.counts()["cancelled"] >= 1  # the case that leaves


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_is_found(model, fault):
    with running_server(model, cache={"num_blocks": 2000}) as server:
        fault(server)
        found = [finding for case in sorted(FAULTS[fault]) for finding in check(server.url, case, num_turns=4).findings]
    assert found
    assert found[0].num_tries == 3
    assert found[0].difference > 1


@pytest.mark.parametrize("fault", [None, state_under_an_earlier_key])
def test_a_state_under_an_earlier_key_is_found(hybrid, fault):
    with running_server(hybrid, cache={"num_blocks": 2000}) as server:
        if fault:
            fault(server)
        checkup = check(server.url, "edits", num_turns=2)
    assert bool(checkup.findings) == bool(fault)


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_stale_adapter_is_found(model, is_stale):
    with (
        running_server(model, cache={"num_blocks": 2000}) as server,
        proxy_of(server, PlayedAdapters(server, is_stale=is_stale)) as url,
    ):
        checkup = check(url, "reloads", adapter_paths=["one", "two"])
    assert checkup.num_tries["reloads"] == 1
    assert bool(checkup.findings) == is_stale


@pytest.mark.parametrize("is_stale", [False, True])
def test_an_adapter_that_finds_the_kv_of_the_model_is_found(model, is_stale):
    with (
        running_server(model, cache={"num_blocks": 2000}) as server,
        proxy_of(server, PlayedAdapters(server, ["one", "two"], is_stale=is_stale)) as url,
    ):
        checkup = check(url, "adapters")
    assert checkup.num_tries["adapters"] == 1
    assert bool(checkup.findings) == is_stale


@pytest.mark.parametrize("is_stale", [False, True])
def test_the_kv_of_another_image_is_found(model, is_stale):
    with (
        running_server(model, cache={"num_blocks": 2000}) as server,
        proxy_of(server, PlayedImages(is_stale=is_stale)) as url,
    ):
        checkup = check(url, "images")
    assert checkup.num_tries["images"] == 1
    assert bool(checkup.findings) == is_stale
    assert "images" not in checkup.patient.measured


def test_a_salt_that_is_dropped_is_found(model, monkeypatch):
    def make_unsalted(*arguments, salt=None, **options):
        return Sequence(*arguments, **options)

    monkeypatch.setattr(intake, "KVSequence", make_unsalted)
    with running_server(model) as server:
        checkup = check(server.url, "salts")
    (finding,) = checkup.findings
    assert "cached tokens" in finding.got
    assert checkup.patient.coldness.by == "never"
    assert "there are no cold answers" in as_text(checkup)


def test_the_command_prints_json_writes_a_page_and_ends_with_1_if_it_found_something(model, tmp_path, capsys):
    page = tmp_path / "page.html"
    arguments = ["--only", "middles", "--max-requests", "60", "--json", "--html", str(page)]
    with running_server(model, cache={"num_blocks": 2000}) as server:
        with pytest.raises(SystemExit) as ended:
            main(["verify", server.url, *arguments])
        assert not ended.value.code
        assert json.loads(capsys.readouterr().out)["findings"] == []
        next(iter(FAULTS))(server)
        with pytest.raises(SystemExit) as ended:
            main(["verify", server.url, *arguments])
        assert ended.value.code == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["case"] == "middles"
    assert finding["repeat"] == f"kvblocks verify {server.url} --only middles --seed 1"
    shown = page.read_text(encoding="utf-8")
    assert finding["what"] in shown
    assert "http" not in shown.replace(server.url, "")


def test_a_page_that_cant_be_written_is_named_before_the_server_is_asked(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["verify", "http://127.0.0.1:9", "--html", str(tmp_path / "none" / "page.html")])
    assert ended.value.code == 2
    assert "--html: expected a file in a folder that exists, got" in capsys.readouterr().err


def test_no_server_and_wrong_arguments_are_named():
    with pytest.raises(TargetError, match=r"127\.0\.0\.1:9"):
        Target("http://127.0.0.1:9")
    with pytest.raises(InvalidArgumentError, match="expected http://HOST:PORT"):
        Target("ftp://x")
    for options, message in (
        ({"max_requests": 0}, "max_requests: expected at least 1, got 0"),
        ({"only": "all"}, "only: expected one of salts, usage"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            CheckupOptions(**options)


def test_minutes_are_checked(capsys):
    for wrong in ("0", "-1", "nan"):
        with pytest.raises(SystemExit) as ended:
            main(["verify", "http://127.0.0.1:9", "--minutes", wrong])
        assert ended.value.code == 2
        assert "--minutes: expected more than 0, got" in capsys.readouterr().err


def test_it_ends_when_its_requests_are_used_up(model):
    with running_server(model, cache={"num_blocks": 2000}) as server, Target(server.url) as target:
        checkup = Checkup(Patient(target), CheckupOptions(max_requests=30))
        checkup.run()
        assert 30 <= target.num_requests < 80
        assert as_html(checkup).startswith("<!doctype html>")
