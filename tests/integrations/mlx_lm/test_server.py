"""mlx-lm's own server over HTTP, with ours put in by each way there is: two users, and a kill with a restart."""

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import mlx_lm.server
import pytest

from integrations.mlx_lm.serving import ROOT, Server, make_folder
from kvblocks import InvalidArgumentError, UnsupportedEngineError
from kvblocks.integrations import auto
from kvblocks.integrations.mlx_lm import BlockPromptCache, install, uninstall
from kvblocks.integrations.mlx_lm.probe import check_mlx_lm, check_server

OURS = ("-m", "kvblocks.integrations.mlx_lm")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / "llama", "llama")


def words(start: int, number: int) -> str:
    return " ".join([f"w{(start + 7 * i) % 100}" for i in range(number)])


def talk(server: Server, users: int = 2, turns: int = 3):
    """Users who take turns. Returns each answer, and how many of the prompt's tokens were cached."""
    system = {"role": "system", "content": words(0, 100)}
    chats = [[system] for _ in range(users)]
    answers, cached = [], []
    for turn in range(turns):
        for user, messages in enumerate(chats):
            messages.append({"role": "user", "content": words(31 * user + turn, 30)})
            text, _, number = server.chat(messages)
            messages.append({"role": "assistant", "content": text})
            answers.append(text)
            cached.append(number)
    return answers, cached


def test_answers_and_hits_are_those_of_mlx_lm_and_survive_a_kill(llama, tmp_path):
    folder = ("--cache-folder", str(tmp_path / "kv"), "--cache-folder-bytes", "100MB")
    with Server(llama, tmp_path / "theirs.log", "-m", "mlx_lm.server") as server:
        answers, cached = talk(server)
    assert len(set(answers)) > 1
    with Server(llama, tmp_path / "ours.log", *OURS, *folder) as server:
        assert talk(server) == (answers, cached)
        assert cached[0] == 0 and all(number > 100 for number in cached[1:])
        deadline = time.monotonic() + 60
        while True:  # until the last insertion is on the disk; then the process is killed
            size = sum([file.stat().st_size for file in (tmp_path / "kv").rglob("*") if file.is_file()])
            time.sleep(0.5)
            if size == sum([file.stat().st_size for file in (tmp_path / "kv").rglob("*") if file.is_file()]):
                break
            assert time.monotonic() < deadline
    with Server(llama, tmp_path / "again.log", *OURS, *folder) as server:
        again, found = talk(server)
        assert again == answers
        assert found[0] >= 128  # of the first prompt, whose server is dead
        assert all(new >= old // 64 * 64 for new, old in zip(found, cached, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text", "lfm2"])
def test_a_server_of_other_layers(name, tmp_path):
    model = make_folder(tmp_path / name, name)
    with Server(model, tmp_path / "theirs.log", "-m", "mlx_lm.server") as server:
        answers, cached = talk(server)
    folder = ("--cache-folder", str(tmp_path / "kv"), "--cache-folder-bytes", "100MB", "--cache-block-size", "16")
    with Server(model, tmp_path / "ours.log", *OURS, *folder) as server:
        ours, found = talk(server)
        assert ours == answers and all(new >= old for new, old in zip(found, cached, strict=True))
        time.sleep(2)  # what a kill may lose
    with Server(model, tmp_path / "again.log", *OURS, *folder) as server:
        again, found = talk(server)
        assert again == answers and found[0] > 0


@pytest.mark.slow
def test_one_environment_variable_and_no_line(llama, tmp_path):
    """In an interpreter of its own, which has all packages of this one, so that nothing is written beside them."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    (site / "all.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    show = "import mlx_lm.models.cache as c, mlx_lm.server as s; "
    show += "print(c.LRUPromptCache.__mro__[1].__name__, s.LRUPromptCache is c.LRUPromptCache)"

    def run(*arguments: str, **environment: str) -> str:
        values = {key: value for key, value in os.environ.items() if key != "KVBLOCKS_AUTO"}
        done = subprocess.run(
            [str(python), *arguments], env={**values, **environment}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    assert run("-c", show, KVBLOCKS_AUTO="mlx_lm").startswith("object True")  # nobody has asked for it
    run("-m", "kvblocks.integrations.auto", "enable")
    assert run("-c", show).startswith("object True")
    assert run("-c", show, KVBLOCKS_AUTO="mlx_lm").startswith("BlockPromptCache True")
    assert "got sglang" in run("-c", show, KVBLOCKS_AUTO="sglang,mlx_lm")
    broken = "import sys; sys.modules['kvblocks.integrations.mlx_lm.install'] = None; "
    told = run("-c", broken + show, KVBLOCKS_AUTO="mlx_lm")
    assert told.startswith("object True") and "was not installed" in told
    run("-m", "kvblocks.integrations.auto", "disable")
    assert run("-c", show, KVBLOCKS_AUTO="mlx_lm").startswith("object True")
    assert auto.main(["on"]) == 2


def test_install_and_uninstall():
    theirs = mlx_lm.server.LRUPromptCache
    made = install(max_bytes=1000, block_size=16)
    try:
        assert mlx_lm.server.LRUPromptCache is made and issubclass(made, BlockPromptCache)
        cache = mlx_lm.server.LRUPromptCache(10)
        assert (cache.max_bytes, cache.max_size, cache.block_size) == (1000, None, 16)
        assert (made(3, max_bytes=7).max_size, made(3, max_bytes=7).max_bytes) == (3, 7)
        assert install().__mro__[1] is BlockPromptCache and mlx_lm.server.LRUPromptCache().max_bytes > 2**28
        for options in ({"max_bytes": -1}, {"max_bytes": "1"}, {"block_size": 0}):
            with pytest.raises(InvalidArgumentError):
                install(**options)
    finally:
        uninstall()
    assert mlx_lm.server.LRUPromptCache is theirs is mlx_lm.models.cache.LRUPromptCache
    uninstall()


def test_another_mlx_lm_is_refused_or_warned_of(monkeypatch):
    from mlx_lm.models import cache

    check_mlx_lm()
    check_server(mlx_lm.server)
    with monkeypatch.context() as patch:
        patch.setattr("mlx_lm.__version__", "9.9")
        with pytest.warns(UserWarning, match="not with 9.9"):
            check_mlx_lm()
    with monkeypatch.context() as patch:
        patch.setattr(cache.KVCache, "state", property(lambda _: (1, 2)))
        patch.delattr(cache, "ArraysCache")
        patch.setattr(cache.LRUPromptCache, "fetch_nearest_cache", lambda self, key: None)
        with pytest.raises(UnsupportedEngineError, match=r"fetch_nearest_cache\(model, tokens\).*KVCache.*ArraysCache"):
            install()
    with monkeypatch.context() as patch:
        patch.setattr(mlx_lm.server, "run", check_mlx_lm)
        with pytest.raises(UnsupportedEngineError, match="run"):
            install()
    assert mlx_lm.server.LRUPromptCache.__mro__[1] is object


@pytest.mark.slow
def test_the_server_refuses_bad_options_in_words():
    for arguments, words_of_it in [
        (["--cache-block-size", "0"], "block_size"),
        (["--cache-bytes=-3"], "--cache-bytes: expected"),
    ]:
        done = subprocess.run(
            [sys.executable, *OURS, *arguments, "--model", "none"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2 and words_of_it in done.stderr, done.stderr
    assert Path(ROOT / "kvblocks").is_dir()
