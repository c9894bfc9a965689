"""The kernels run natively where there is a GPU, else in Triton's interpreter, which must be on before triton loads."""

import importlib.util
import os
import sys

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# These files launch nothing, and test what a machine without triton has, too.
WITHOUT_TRITON = {"test_layout.py", "test_table.py"}

if HAS_TRITON and DEVICE == "cpu":
    already_loaded = "triton" in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language
    from triton.runtime.interpreter import InterpretedFunction

    if already_loaded and not isinstance(triton.language.cdiv, InterpretedFunction):
        raise pytest.UsageError("triton was imported before its interpreter was turned on: set TRITON_INTERPRET=1")

    from kvblocks.kernels.layout import is_interpreted

    try:
        is_interpreted()
    except ImportError as error:
        raise pytest.UsageError(str(error)) from error


class SkippedModule(pytest.Module):
    """A test file that can't be imported on this machine."""

    def collect(self):
        pytest.skip("needs triton, which PyPI has for Linux: kvblocks[gpu]", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if not HAS_TRITON and module_path.name not in WITHOUT_TRITON:
        return SkippedModule.from_parent(parent, path=module_path)
    return None


def pytest_configure(config):
    # Triton 3.6's interpreter with numpy 2.3.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning:triton")


@pytest.fixture(autouse=True)
def few_sms(request, monkeypatch):
    """Assume as few SMs on a GPU as in the interpreter: on 132, most of these small calls would split nothing."""
    if DEVICE == "cuda" and HAS_TRITON and request.path.name not in WITHOUT_TRITON:
        from kvblocks.kernels import table

        monkeypatch.setattr(table, "count_sms", lambda _device: table.INTERPRETED_SMS)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the kernels' tensors."""
    return torch.device(DEVICE)
