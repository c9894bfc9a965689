"""Delta nets by a stand-in for flash-linear-attention, in plain torch: what its kernels get, and what becomes of it.

The stand-in has, and checks, the signatures of fla-core 0.6.0. Parameters that the engine doesn't use are refused.
"""

import inspect
import sys
import types

import pytest
import torch

from kvblocks.engine.model.hybrid import delta_kernels
from kvblocks.engine.model.hybrid.gated_delta import GatedDelta
from kvblocks.engine.model.hybrid.kimi_delta import KimiDelta

# The parameters behind q, k, v, g and beta, which the engine passes by name.
SIGNATURES = {
    "chunk_gated_delta_rule": "scale initial_state output_final_state use_qk_l2norm_in_kernel"
    " use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context",
    "fused_recurrent_gated_delta_rule": "gk gv scale initial_state output_final_state use_qk_l2norm_in_kernel"
    " use_gate_in_kernel A_log dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens",
    "chunk_kda": "scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel"
    " use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states"
    " state_v_first cu_seqlens cu_seqlens_cpu cp_context use_graph max_num_seqs",
    "fused_recurrent_kda": "A_log dt_bias scale initial_state output_final_state use_qk_l2norm_in_kernel"
    " use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound state_v_first cu_seqlens",
}
USED = {"scale", "initial_state", "output_final_state"}

GATED = GatedDelta(2, 4, 8, 12, 4, 1e-6, is_interleaved=False)
KIMI = KimiDelta(3, 8, 4, 1e-5)
mixers = pytest.mark.parametrize("mixer", [GATED, KIMI])
dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def stand_in(name, calls):
    """A function of the package: token by token, in float64."""

    def kernel(*, q, k, v, g, beta, **options):
        assert options.keys() == USED
        assert options.keys() <= set(SIGNATURES[name].split())
        assert options["output_final_state"] is True
        calls.append((name, q.shape[:2]))
        state = options["initial_state"]
        assert q.dtype == k.dtype == v.dtype in (torch.float16, torch.bfloat16)
        assert g.dtype == beta.dtype == state.dtype == torch.float32
        assert all(part.is_contiguous() for part in (q, k, v, g, beta, state))
        assert q.shape == k.shape
        batch, num_tokens, heads, key_dim = q.shape
        assert v.shape[:3] == beta.shape == (batch, num_tokens, heads)
        assert g.shape == (q.shape if name.endswith("kda") else beta.shape)
        assert state.shape == (batch, heads, key_dim, v.shape[-1])
        if name.startswith("fused"):
            assert num_tokens == 1
        matrix, outputs = state.double(), []
        for token in range(num_tokens):
            query, key, value, decay, write = (part[:, token].double() for part in (q, k, v, g, beta))
            matrix = matrix * decay.exp().reshape(batch, heads, -1, 1)
            error = value - torch.einsum("bhk,bhkv->bhv", key, matrix)
            matrix = matrix + torch.einsum("bhk,bhv,bh->bhkv", key, error, write)
            outputs.append(torch.einsum("bhk,bhkv->bhv", query, matrix) * options["scale"])
        state.fill_(torch.nan)  # it's the kernel's to write to
        return torch.stack(outputs, 1).to(v.dtype), matrix.float()

    return kernel


@pytest.fixture(autouse=True)
def nothing_known():
    """Nothing of the package is remembered from one test to the next."""
    for known in (delta_kernels.load_kernels, delta_kernels.is_installed):
        known.cache_clear()
    yield
    for known in (delta_kernels.load_kernels, delta_kernels.is_installed):
        known.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    """Install the stand-in, and take rows on the CPU for rows on a GPU. The calls of it."""
    found = []
    package = {"fla": types.ModuleType("fla"), "fla.ops": types.ModuleType("fla.ops")}
    package["fla"].__spec__ = sys.__spec__  # so that it is found
    for rule in ("kda", "gated_delta_rule"):
        module = package[f"fla.ops.{rule}"] = types.ModuleType(f"fla.ops.{rule}")
        for name in (f"chunk_{rule}", f"fused_recurrent_{rule}"):
            setattr(module, name, stand_in(name, found))
    for name, module in package.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(delta_kernels, "_is_on_gpu", lambda rows: True)
    return found


def weights_of(mixer):
    generator = torch.Generator().manual_seed(1)
    sizes = mixer.shapes(16)
    return mixer.load(lambda name: torch.randn(sizes[name], generator=generator) / 3).weights


def both_ways(mixer, form, num_rows, dtype, monkeypatch):
    """The outputs and states of a form by the package, and in plain torch of the same rows."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(num_rows, mixer.num_inputs, generator=generator).to(dtype)
    num_seqs = num_rows if form == "recur" else 1
    states = tuple(torch.randn(num_seqs, *part.shape, generator=generator) for part in mixer.parts)
    before = [part.clone() for part in states]
    weights, found = weights_of(mixer), []
    for on_gpu in (True, False):
        monkeypatch.setattr(delta_kernels, "_is_on_gpu", lambda rows, on_gpu=on_gpu: on_gpu)
        output, after = getattr(mixer, form)(weights, rows, states)
        assert all(torch.equal(part, kept) for part, kept in zip(states, before, strict=True))
        assert [part.dtype for part in after] == [torch.float32] * 2
        assert (output.dtype, output.shape) == (dtype, (num_rows, mixer.num_outputs))
        found.append((output.float(), *after))
    return found


@mixers
@dtypes
@pytest.mark.parametrize(("form", "num_rows"), [("recur", 1), ("recur", 5), ("scan", 1), ("scan", 70)])
def test_the_package_computes_what_torch_does(mixer, dtype, form, num_rows, calls, monkeypatch):
    by_package, by_torch = both_ways(mixer, form, num_rows, dtype, monkeypatch)
    rule = "kda" if mixer is KIMI else "gated_delta_rule"
    name = f"{'fused_recurrent' if form == 'recur' else 'chunk'}_{rule}"
    assert calls == [(name, (num_rows, 1) if form == "recur" else (1, num_rows))]
    for one, other in zip(by_package, by_torch, strict=True):  # queries, keys and values are rounded to the dtype
        largest = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=largest * 8 * torch.finfo(dtype).eps)


@mixers
def test_float32_and_a_cpu_take_plain_torch(mixer, calls, monkeypatch):
    both_ways(mixer, "scan", 20, torch.float32, monkeypatch)
    assert not calls
    monkeypatch.setattr(delta_kernels, "_is_on_gpu", lambda rows: rows.is_cuda)
    mixer.scan(
        weights_of(mixer),
        torch.randn(20, mixer.num_inputs).bfloat16(),
        tuple(torch.zeros(1, *part.shape) for part in mixer.parts),
    )
    assert not calls


def test_without_the_package_it_is_plain_torch(monkeypatch):
    monkeypatch.setattr(delta_kernels, "_is_on_gpu", lambda rows: True)
    monkeypatch.setitem(sys.modules, "fla", None)
    assert not delta_kernels.has_kernels(torch.zeros(1, dtype=torch.bfloat16))


def test_the_stand_in_has_the_package_s_signatures():
    """With the package installed, its functions' parameters are those that the stand-in knows."""
    kda = pytest.importorskip("fla.ops.kda")
    gated = pytest.importorskip("fla.ops.gated_delta_rule")
    for name, parameters in SIGNATURES.items():
        function = getattr(kda if name.endswith("kda") else gated, name)
        assert {"q", "k", "v", "g", "beta", *parameters.split()} <= set(inspect.signature(function).parameters)
