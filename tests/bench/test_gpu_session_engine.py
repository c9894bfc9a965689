"""What the items of a GPU session measure, at tiny sizes on a CPU. No test asks how long anything took."""

import pytest
import torch

from bench.gpu_session import hybrids
from bench.gpu_session.engine import Runs, Scale
from kvblocks import engine as kvblocks_engine

BATCH, CONTEXT = 8, 40


@pytest.fixture
def runs(monkeypatch):
    """Decode steps of a batch whose prompts need 40 steps, since each has room for only 8 tokens beside the decodes."""
    make = kvblocks_engine.Engine
    monkeypatch.setattr(Runs, "_small", lambda _self, number, *, least=1: number)
    in_torch = {"attention": "torch", "overlap": True}
    monkeypatch.setattr(kvblocks_engine, "Engine", lambda model, **options: make(model, **options | in_torch))
    return Runs(Scale(torch.device("cpu"), torch.float32, num_steps=5, chunk=16, shrink=64))


def test_no_request_ends_while_steps_are_timed(runs):
    facts = runs.decode(BATCH, CONTEXT, {})
    assert facts["prefill_steps"] > 20
    assert {"step_ms", "step_ms, no overlap"} <= facts.keys()


def test_steps_of_a_smaller_batch_are_not_timed(runs, monkeypatch):
    monkeypatch.setattr(runs, "_count_tokens", lambda _batch, _context: 2 * 5 + 20, raising=False)
    with pytest.raises(RuntimeError, match=r"expected a token for each of 8 requests in every timed step, got \[\d"):
        runs.decode(BATCH, CONTEXT, {})


@pytest.mark.parametrize(("kind", "package"), [("gated delta net", "fla"), ("Mamba2", "mamba_ssm")])
def test_kernels_that_are_not_installed_are_not_called_right(monkeypatch, kind, package):
    from kvblocks.engine.model.hybrid import delta_kernels, mamba_kernels

    mixer, gpu = hybrids.mixers(is_rehearsal=False)[kind], torch.device("cuda")
    for module in (delta_kernels, mamba_kernels):
        monkeypatch.setattr(module, "is_installed", bool)
    assert hybrids.missing_kernels(mixer, gpu) == f"not run: {package} is not installed"
    for module in (delta_kernels, mamba_kernels):
        monkeypatch.setattr(module, "is_installed", lambda: True)
    assert hybrids.missing_kernels(mixer, gpu) is None


def test_plain_torch_is_not_compared_with_itself():
    (mixer,) = hybrids.mixers(is_rehearsal=True).values()
    facts = hybrids.Layer(mixer, torch.device("cpu"), 20, 2).compare("recur")
    assert facts["kernels"] == "not run: they need a GPU"
    assert facts["is_right"] and max(facts["torch"]["errors"]) < hybrids.LARGEST_ERROR
