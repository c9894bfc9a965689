"""These tests need a real mlx-lm: `make test-mlx` gives it an environment of its own. Elsewhere they are skipped."""

import importlib.util

import pytest

HAS_MLX = importlib.util.find_spec("mlx_lm") is not None and importlib.util.find_spec("mlx") is not None
REASON = "needs mlx-lm, which has an environment of its own: make test-mlx"


class SkippedModule(pytest.Module):
    """A file of tests that cannot be imported here."""

    def collect(self):
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return None if HAS_MLX else SkippedModule.from_parent(parent, path=module_path)


def pytest_configure(config):
    if HAS_MLX:  # what mlx-lm and its libraries warn about is not ours to mend
        for category in ("DeprecationWarning", "FutureWarning", "UserWarning", "ResourceWarning"):
            config.addinivalue_line("filterwarnings", f"ignore::{category}")
