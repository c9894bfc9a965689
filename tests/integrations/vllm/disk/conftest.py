"""Every test begins with vLLM's hashes as its engine core makes them by default."""

import pytest


@pytest.fixture(autouse=True)
def _hashing(monkeypatch):
    from integrations.vllm.disk.stand import begin_hashing

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    begin_hashing()
