"""These tests need a real vLLM: `make test-vllm` gives it an environment of its own. Elsewhere they are skipped."""

import importlib.util
import os

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
REASON = "needs vLLM, which has an environment of its own: make test-vllm"
# Seeds for each configuration. Ten are what the integration promises; fewer are for a machine in a hurry.
SEEDS = int(os.environ.get("VLLM_SEEDS", "10"))

if HAS_VLLM:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


class SkippedModule(pytest.Module):
    """A file of tests that cannot be imported here."""

    def collect(self):
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return None if HAS_VLLM else SkippedModule.from_parent(parent, path=module_path)


def pytest_configure(config):
    if HAS_VLLM:  # what vLLM and its libraries warn about is not ours to mend
        for category in ("DeprecationWarning", "FutureWarning", "UserWarning", "ResourceWarning"):
            config.addinivalue_line("filterwarnings", f"ignore::{category}")


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(SEEDS))


@pytest.fixture(scope="session", autouse=True)
def _look_at_models_here():
    """Have vLLM look at a model's class in this process. It would import itself anew for that, in another one."""
    if HAS_VLLM:
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda look: look()  # noqa: SLF001


@pytest.fixture(scope="session")
def num_seeds() -> int:
    """How many seeds a test that sums over them takes."""
    return SEEDS
