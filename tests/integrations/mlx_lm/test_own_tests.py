"""mlx-lm's own tests of its prompt cache and its server, with ours put in.

Its tests download a model; here they get a tiny random one. Five of its six tests of `LRUPromptCache` keep objects
without arrays; ours keeps a copy of each, as it does with all classes that it doesn't know.
"""

import importlib.util
import unittest
from pathlib import Path

import mlx_lm.server
import mlx_lm.utils
import pytest

from integrations.mlx_lm import models
from integrations.mlx_lm.serving import make_folder
from kvblocks.integrations.mlx_lm import BlockPromptCache, install, uninstall

SOURCES = Path(mlx_lm.server.__file__).parents[4] / f"mlx-lm-{mlx_lm.__version__}" / "tests"
SUITES = ("TestServer", "TestServerWithDraftModel", "TestServerKVCacheQuantization")
SUITES += ("TestServerWithoutKVCacheQuantization", "TestGenerationThreadDeath")
ELSEWHERE = {"test_handle_models", "test_handle_models_local"}  # need the hub's folder of downloaded models


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Their module, which finds ours under the name of theirs."""
    if not SOURCES.is_dir():
        pytest.skip("needs mlx-lm's sources, which `make test-mlx` fetches")
    patch = pytest.MonkeyPatch()
    patch.setitem(models.CONFIGS, "llama", {**models.CONFIGS["llama"], "head_dim": 64})  # they quantize groups of 64
    folder = make_folder(tmp_path_factory.mktemp("own") / "llama", "llama")
    load = mlx_lm.utils.load
    patch.setattr(mlx_lm.utils, "load", lambda path, *args, **options: load(str(folder), *args, **options))
    install(block_size=8)
    spec = importlib.util.spec_from_file_location("mlx_lm_own_test_server", SOURCES / "test_server.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert issubclass(module.LRUPromptCache, BlockPromptCache)
    yield module
    uninstall()
    patch.undo()


def run(suite) -> unittest.TestResult:
    result = unittest.TestResult()
    suite.run(result)
    assert not result.errors and not result.failures, [*result.errors, *result.failures]
    return result


def test_its_tests_of_the_prompt_cache_pass(theirs):
    names = unittest.TestLoader().getTestCaseNames(theirs.TestLRUPromptCache)
    assert run(unittest.TestSuite([theirs.TestLRUPromptCache(name) for name in names])).testsRun == len(names) == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_its_tests_of_the_server_pass(theirs, name):
    kind = getattr(theirs, name)
    names = [test for test in unittest.TestLoader().getTestCaseNames(kind) if test not in ELSEWHERE]
    assert run(unittest.TestSuite([kind(test) for test in names])).testsRun == len(names) >= 1
