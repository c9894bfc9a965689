"""transformers as it is installed. Its own warnings are ignored."""

import logging

import pytest


def pytest_configure(config):
    for category in ("DeprecationWarning", "FutureWarning", "UserWarning", "ResourceWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{category}:transformers")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Without psutil transformers logs errors on a CPU, and goes on."""
    monkeypatch.setattr(logging.getLogger("ContinuousBatchingLogger"), "disabled", True)


@pytest.fixture(scope="session")
def llama():
    """Two layers of full attention."""
    from integrations.transformers.batching import make_model

    return make_model()
