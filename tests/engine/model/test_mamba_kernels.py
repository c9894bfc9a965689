"""Mamba2 by a stand-in for mamba-ssm, in plain torch: what its kernels get, and what becomes of it.

The stand-in has, and checks, the signatures of mamba-ssm 2.3.2. Parameters that the engine doesn't use are refused.
"""

import inspect
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from kvblocks.engine.model.hybrid import mamba_kernels
from kvblocks.engine.model.hybrid.mamba2 import Mamba2

SIGNATURES = {
    "mamba_chunk_scan_combined": "x dt A B C chunk_size D z dt_bias initial_states seq_idx cu_seqlens dt_softplus"
    " dt_limit return_final_states return_varlen_states",
    "selective_state_update": "state x dt A B C D z dt_bias dt_softplus state_batch_indices",
}
MODULES = {"mamba_chunk_scan_combined": "ssd_combined", "selective_state_update": "selective_state_update"}
HALVES = (torch.float16, torch.bfloat16)

MIXER = Mamba2(6, 8, 16, 2, 4, 1e-6, has_conv_bias=True, has_bias=False)


def token(state, value, time, rates, key, query):
    """One token of a sequence, in float64: its output and the state behind it."""
    decay, skip, step_bias = rates
    shared = len(time) // len(key)
    step = F.softplus(time + step_bias)
    key, query = key.repeat_interleave(shared, 0), query.repeat_interleave(shared, 0)
    state = state * (step * decay).exp()[:, None, None] + torch.einsum("h,hd,hs->hds", step, value, key)
    return torch.einsum("hds,hs->hd", state, query) + value * skip[:, None], state


def check_inputs(value, time, decay, key, query, others):
    assert value.dtype == key.dtype == query.dtype in HALVES
    assert {part.dtype for part in (time, decay, *others)} == {torch.float32}
    assert all(part.is_contiguous() for part in (value, key, query))


def scan(calls):
    def kernel(x, dt, A, B, C, chunk_size, *, D, dt_bias, dt_softplus, initial_states, return_final_states):  # noqa: N803
        check_inputs(x, dt, A, B, C, (D, dt_bias, initial_states))
        assert dt_softplus
        assert return_final_states
        assert chunk_size == 256
        batch, num_tokens, heads, head_dim = x.shape
        assert batch == 1
        assert dt.shape == (batch, num_tokens, heads)
        assert A.shape == D.shape == dt_bias.shape == (heads,)
        assert B.shape == C.shape == (batch, num_tokens, MIXER.num_groups, MIXER.state_dim)
        assert initial_states.shape == (batch, heads, head_dim, MIXER.state_dim)
        calls.append(("scan", num_tokens))
        state, outputs = initial_states[0].double(), []
        for row in range(num_tokens):
            value, time, key, query = (part[0, row].double() for part in (x, dt, B, C))
            output, state = token(state, value, time, (A, D, dt_bias), key, query)
            outputs.append(output)
        initial_states.fill_(torch.nan)
        return torch.stack(outputs)[None].to(x.dtype), state[None].float()

    return kernel


def update(calls):
    def kernel(state, x, dt, A, B, C, *, D, dt_bias, dt_softplus):  # noqa: N803
        check_inputs(x, dt, A, B, C, (D, dt_bias, state))
        assert dt_softplus
        num_seqs, heads, head_dim = x.shape
        assert dt.shape == x.shape
        assert A.shape == (heads, head_dim, MIXER.state_dim) == state.shape[1:]
        assert D.shape == dt_bias.shape == (heads, head_dim)
        assert B.shape == C.shape == (num_seqs, MIXER.num_groups, MIXER.state_dim)
        # The kernel takes a head's channels together only if these strides are 0.
        assert A.stride()[1:] == (0, 0)
        assert dt.stride(-1) == D.stride(-1) == dt_bias.stride(-1) == 0
        calls.append(("update", num_seqs))
        outputs = []
        for seq in range(num_seqs):
            rates = (A[:, 0, 0], D[:, 0], dt_bias[:, 0])
            output, after = token(
                state[seq].double(), x[seq].double(), dt[seq, :, 0].double(), rates, B[seq].double(), C[seq].double()
            )
            outputs.append(output)
            state[seq] = after.float()
        return torch.stack(outputs).to(x.dtype)

    return kernel


@pytest.fixture(autouse=True)
def nothing_known():
    """Nothing of the package is remembered from one test to the next."""
    for known in (mamba_kernels.load_kernels, mamba_kernels.is_installed):
        known.cache_clear()
    yield
    for known in (mamba_kernels.load_kernels, mamba_kernels.is_installed):
        known.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    """Install the stand-in, and take rows on the CPU for rows on a GPU. The calls of it."""
    found = []
    names = ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton")
    package = {name: types.ModuleType(name) for name in names}
    package["mamba_ssm"].__spec__ = sys.__spec__  # so that it is found
    for name, make in (("mamba_chunk_scan_combined", scan), ("selective_state_update", update)):
        module = package[f"mamba_ssm.ops.triton.{MODULES[name]}"] = types.ModuleType(MODULES[name])
        setattr(module, name, make(found))
    for name, module in package.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(mamba_kernels, "_is_on_gpu", lambda rows: True)
    return found


def weights_of(mixer):
    generator = torch.Generator().manual_seed(1)
    sizes = mixer.shapes(16)
    return mixer.load(lambda name: torch.randn(sizes[name], generator=generator) / 3).weights


def both_ways(form, num_rows, dtype, monkeypatch):
    """The outputs and states of a form by the package, and in plain torch of the same rows."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(num_rows, MIXER.num_inputs, generator=generator).to(dtype)
    num_seqs = num_rows if form == "recur" else 1
    states = tuple(torch.randn(num_seqs, *part.shape, generator=generator) for part in MIXER.parts)
    before = [part.clone() for part in states]
    weights, found = weights_of(MIXER), []
    for on_gpu in (True, False):
        monkeypatch.setattr(mamba_kernels, "_is_on_gpu", lambda rows, on_gpu=on_gpu: on_gpu)
        output, after = getattr(MIXER, form)(weights, rows, states)
        assert all(torch.equal(part, kept) for part, kept in zip(states, before, strict=True))
        assert [part.dtype for part in after] == [torch.float32] * 2
        assert (output.dtype, output.shape) == (dtype, (num_rows, MIXER.num_outputs))
        found.append((output.float(), *after))
    return found


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("form", "num_rows"), [("recur", 1), ("recur", 5), ("scan", 1), ("scan", 70)])
def test_the_package_computes_what_torch_does(dtype, form, num_rows, calls, monkeypatch):
    by_package, by_torch = both_ways(form, num_rows, dtype, monkeypatch)
    assert calls == [("update" if form == "recur" else "scan", num_rows)]
    for one, other in zip(by_package, by_torch, strict=True):  # x, b and c are rounded to the dtype
        largest = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=largest * 8 * torch.finfo(dtype).eps)


def test_float32_and_a_cpu_take_plain_torch(calls, monkeypatch):
    both_ways("scan", 20, torch.float32, monkeypatch)
    assert not calls
    monkeypatch.setattr(mamba_kernels, "_is_on_gpu", lambda rows: rows.is_cuda)
    MIXER.scan(
        weights_of(MIXER),
        torch.randn(20, MIXER.num_inputs).bfloat16(),
        tuple(torch.zeros(1, *part.shape) for part in MIXER.parts),
    )
    assert not calls


def test_without_the_package_it_is_plain_torch(monkeypatch):
    monkeypatch.setattr(mamba_kernels, "_is_on_gpu", lambda rows: True)
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    assert not mamba_kernels.has_kernels(torch.zeros(1, dtype=torch.bfloat16))


def test_the_stand_in_has_the_package_s_signatures():
    """With the package installed, its functions' parameters are those that the stand-in knows."""
    for name, parameters in SIGNATURES.items():
        module = pytest.importorskip(f"mamba_ssm.ops.triton.{MODULES[name]}")
        assert set(parameters.split()) <= set(inspect.signature(getattr(module, name)).parameters)
    for make, name in ((scan, "mamba_chunk_scan_combined"), (update, "selective_state_update")):
        assert set(inspect.signature(make([])).parameters) <= set(SIGNATURES[name].split())
