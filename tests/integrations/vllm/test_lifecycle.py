"""What is replaced in memory, for how long, and that vLLM is as before without our flag."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import vllm
from vllm.v1.engine import core

from bench.vllm.schedulers import Settings, make_kv_cache_config, make_scheduler, make_vllm_config, our_scheduler
from integrations.vllm.one_after_another import MARK
from kvblocks.integrations.vllm import uninstall

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


class AnEngineCore:
    """Asks for a hasher as vLLM's engine core does: from its constructor, behind its scheduler."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.request_block_hasher = core.get_request_block_hasher(16, hash)


@pytest.fixture(autouse=True)
def _taken_back():
    uninstall()
    yield
    uninstall()


def test_our_engine_core_hashes_nothing_and_the_next_one_does():
    original = core.get_request_block_hasher
    scheduler = make_scheduler(Settings(), our_scheduler(Settings()))
    assert core.get_request_block_hasher is not original
    assert AnEngineCore(scheduler).request_block_hasher is None
    assert core.get_request_block_hasher is original
    assert AnEngineCore(make_scheduler(Settings())).request_block_hasher is not None


def test_another_engine_core_gets_its_hasher_where_ours_never_asked():
    original = core.get_request_block_hasher
    make_scheduler(Settings(), our_scheduler(Settings()))  # alone, or its engine core failed on the way
    assert AnEngineCore(make_scheduler(Settings())).request_block_hasher is not None
    assert core.get_request_block_hasher is original


def test_all_is_taken_back_at_once():
    original = core.get_request_block_hasher
    make_scheduler(Settings(), our_scheduler(Settings()))
    make_scheduler(Settings(), our_scheduler(Settings()))
    uninstall()
    assert core.get_request_block_hasher is original


def test_nothing_is_replaced_where_nothing_is_cached():
    settings = Settings(has_caching=False)
    original = core.get_request_block_hasher
    make_scheduler(settings, our_scheduler(settings))
    assert core.get_request_block_hasher is original


def test_requests_are_hashed_where_the_experts_of_cached_tokens_are_asked_for():
    """vLLM finds these by its hashes (--enable-return-routed-experts)."""
    original, config = core.get_request_block_hasher, make_vllm_config(Settings())
    config.aux_output_config.enable_return_routed_experts = True
    scheduler = make_scheduler(Settings(), our_scheduler(Settings()), config=config)
    assert core.get_request_block_hasher is original
    assert AnEngineCore(scheduler).request_block_hasher is not None


def test_requests_are_hashed_where_vllms_own_manager_is_used_instead():
    settings = Settings(windows=(64,))
    original, config = core.get_request_block_hasher, make_vllm_config(settings)
    config.additional_config = {"kvblocks_fallback": True}
    groups = make_kv_cache_config(settings, config)
    window = groups.kv_cache_groups[1]
    window.kv_cache_spec = replace(window.kv_cache_spec, extra_retained_tokens=2)
    with pytest.warns(UserWarning, match="windows that retain more"):
        scheduler = make_scheduler(settings, our_scheduler(settings), config=config, groups=groups)
    assert core.get_request_block_hasher is original
    assert AnEngineCore(scheduler).request_block_hasher is not None


def files_of_vllm():
    folder = Path(vllm.__file__).parent / "v1"
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*.py")}


def run_engines(in_process):
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    multiprocessing = "0" if in_process else "1"
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing}
    command = [sys.executable, "-m", "integrations.vllm.one_after_another"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=350, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix(MARK))


def test_an_engine_after_one_of_ours_is_vllms_own_and_no_file_is_changed():
    before = files_of_vllm()
    first, second = run_engines(in_process=True)
    assert (first["manager"], first["hashes"], first["is_whole"]) == ("KVBlocksCacheManager", False, True)
    assert (second["manager"], second["hashes"], second["is_whole"]) == ("KVCacheManager", True, True)
    assert first["cached"] == second["cached"] == [0, 96]
    assert files_of_vllm() == before and len(before) > 100


@pytest.mark.slow
def test_an_engine_core_in_its_own_process_is_served():
    assert run_engines(in_process=False) == [{"cached": [0, 96]}]
