"""Compile a session's kernels on a machine without a GPU: `python -m bench.gpu_session.ahead --target sm90 --to FILE`.

What `smoke` and the engine's warm-up launch is recorded with tensors that only have shapes, compiled for the target,
and packed as Triton's cache. `bench.gpu_session --cache FILE` unpacks it there. Triton finds a kernel in its cache by
the kernel's source, its options, the compiler's version, and the bytes of triton's own package. So both machines need
the same version of triton for the same version of Python. FILE says which, and others are refused. All processes of
both also call `fix_keys`. Each entry names its files by absolute paths, so unpacking rewrites these. The stubs that
launch kernels are always compiled on the machine with the GPU.

It must run without TRITON_INTERPRET.
"""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from lzma import LZMAError
from pathlib import Path
from unittest.mock import patch

import torch

from bench.attention.kernel_keys import fix_keys
from bench.attention.recording import SMS, Recording, record

MANIFEST = "kvblocks-session.json"
_ANEW = "everything is compiled anew"


def manifest() -> dict[str, str]:
    """What both machines must have in common."""
    import triton

    return {"triton": triton.__version__, "python": ".".join(platform.python_version_tuple()[:2])}


def record_smokes(target: str, *, only: str = "") -> Recording:
    """The launches of the smoke cases whose names have `only` in them. Nothing is computed."""
    from bench.attention import cases
    from bench.gpu_session.smoke import smokes

    with record(target) as recording:
        for smoke in smokes():
            is_known = not smoke.workload.is_fp8 or target in ("sm89", "sm90", "sm100")
            if is_known and only in smoke.name:
                smoke.call(cases.build(smoke.workload, torch.device("meta"), 0))
    return recording


def record_engine(target: str, *, max_num_seqs: int = 512) -> Recording:
    """The launches of warming up an engine with Llama 3 8B's shapes, except copies of blocks. Nothing is computed.

    Layers are alike, so one is enough.
    """
    from dataclasses import replace

    from bench.gpu_session.engine import BLOCK_SIZE, GPU, config, random_model
    from kvblocks.engine.attention.cascade import CascadePlanner
    from kvblocks.engine.attention.triton_attention import TritonAttention
    from kvblocks.engine.run.decode_step import run_in_place
    from kvblocks.engine.run.device_runner import DeviceRunner
    from kvblocks.engine.run.forward import DecoderModel
    from kvblocks.kernels.draw import draw_tokens

    shape, device = replace(config(GPU), num_layers=1), torch.device("meta")
    with record(target) as recording:
        model = DecoderModel(shape, random_model(shape, device, GPU.dtype).weights, attention=TritonAttention())
        cascade = CascadePlanner(lambda *_, **__: [], BLOCK_SIZE, device)
        runner = DeviceRunner(model, 1024, BLOCK_SIZE, capture=run_in_place, cascade=cascade)
        runner.draw_tokens = draw_tokens
        for _, step in runner.warm_up_steps(max_num_seqs):
            step()
    return recording


def compile_recorded(target: str, *, only: str = "", num_processes: int = 1) -> Iterator[str]:
    """Compile what a session launches, into TRITON_CACHE_DIR. Yields names of kernels. Raises what the compiler raises.

    Specialisations can't be sent to another process: each records all, and compiles its share.
    """
    share = partial(_compile_share, target, only, num_processes)
    if num_processes == 1:
        yield from share(0)
        return
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        for names in pool.map(share, range(num_processes)):
            yield from names


def _compile_share(target: str, only: str, num_shares: int, index: int) -> list[str]:
    from bench.attention import sass

    fix_keys()
    found = dict(record_smokes(target, only=only).specialisations)
    if not only:
        found |= record_engine(target).specialisations
    chosen = [found[key] for key in sorted(found)][index::num_shares]
    for specialisation in chosen:
        sass.build(specialisation, target)
    return [specialisation.name for specialisation in chosen]


def pack(cache: Path, file: Path) -> None:
    """Pack a folder of Triton's cache, and what it was made by."""
    (cache / MANIFEST).write_text(json.dumps(manifest()), encoding="utf-8")
    with tarfile.open(file, "w:xz") as archive:
        archive.add(cache, ".")


def unpack(file: Path, folder: Path) -> bool:
    """Unpack into an empty folder, so that Triton finds the kernels there. Return whether it can.

    It can't if FILE is missing, broken, or made by other versions, and says so. Then the session compiles everything.
    """
    try:
        with tarfile.open(file) as archive:
            archive.extractall(folder, filter="data")
        made_by = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for group in folder.glob("*/__grp__*.json"):
            _move_group(group)
    except (OSError, EOFError, ValueError, TypeError, KeyError, tarfile.TarError, LZMAError, zlib.error) as error:
        why = f"{type(error).__name__}: {error}"
        print(f"--cache: expected a file of bench.gpu_session.ahead, got {file} ({why}): {_ANEW}", flush=True)
        return False
    if made_by != manifest():
        print(f"--cache: expected one made by {manifest()}, got {made_by}: {_ANEW}", flush=True)
        return False
    return True


def _move_group(group: Path) -> None:
    """Name an entry's files by where they are now: beside the file that lists them."""
    content = json.loads(group.read_text(encoding="utf-8"))
    content["child_paths"] = {name: str(group.resolve().parent / name) for name in content["child_paths"]}
    group.write_text(json.dumps(content), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Compile, pack, and return the exit status: 2 in the interpreter."""
    parser = argparse.ArgumentParser(prog="bench.gpu_session.ahead", description=__doc__)
    parser.add_argument("--to", type=Path, required=True, help="the file to write, such as kernels.tar.xz")
    parser.add_argument("--target", choices=sorted(SMS), default="sm90", help="default: %(default)s")
    parser.add_argument("--only", default="", help="only smoke cases whose names contain this, and no engine")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("bench.gpu_session.ahead: expected TRITON_INTERPRET to be unset", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"TRITON_CACHE_DIR": folder}):
        names = list(compile_recorded(given.target, only=given.only, num_processes=given.processes))
        pack(Path(folder), given.to)
    print(f"{len(names)} kernels, {given.to.stat().st_size / 1e6:.1f} MB, for {given.target} and {manifest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
