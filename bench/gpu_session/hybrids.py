"""The item `hybrids`: layers with recurrent states, and models that have them, on a GPU.

A layer's two forms are computed by plain torch on the GPU, and by the kernels of flash-linear-attention and mamba-ssm,
and compared with plain torch on the CPU. Where a package is missing, the result says so instead. Sizes are those of
Qwen3-Next, Kimi Linear and Granite 4. Models are random and small; in float32 their tokens must equal the CPU's. Cases
run in parallel, so times are rough.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from bench.gpu_session.cases import Case, Facts

if TYPE_CHECKING:
    from torch import Tensor

    from kvblocks.engine.model.hybrid.mixer import StateMixer, States, Weights

LARGEST_ERROR = 0.02
"""The largest root mean square error that counts as right, relative to the exact result: that of bfloat16."""
NUM_TOKENS, NUM_SEQS = 2048, 64
MODELS = ("qwen3-next-small", "kimi-linear-small")


def mixers(*, is_rehearsal: bool) -> "dict[str, StateMixer]":
    """A layer of each kind that has kernels; tiny ones for a rehearsal."""
    from kvblocks.engine.model.hybrid.gated_delta import GatedDelta
    from kvblocks.engine.model.hybrid.kimi_delta import KimiDelta
    from kvblocks.engine.model.hybrid.mamba2 import Mamba2

    if is_rehearsal:
        return {"gated delta net": GatedDelta(1, 2, 16, 16, 4, 1e-6, is_interleaved=True)}
    return {
        "gated delta net": GatedDelta(16, 32, 128, 128, 4, 1e-6, is_interleaved=True),
        "Kimi delta attention": KimiDelta(32, 128, 4, 1e-5),
        "Mamba2": Mamba2(128, 64, 128, 1, 4, 1e-5, has_conv_bias=True, has_bias=False),
    }


def cases(*, is_rehearsal: bool) -> Iterator[Case]:
    """Yield the cases, models first."""
    device = torch.device("cpu" if is_rehearsal else "cuda")
    for name in () if is_rehearsal else MODELS:
        yield f"{name} in float32 gives the CPU's tokens", partial(compare_model, name)
    for name, mixer in mixers(is_rehearsal=is_rehearsal).items():
        layer = Layer(mixer, device, 20 if is_rehearsal else NUM_TOKENS, 2 if is_rehearsal else NUM_SEQS)
        for form in ("scan", "recur"):
            yield f"{name}, {form}", partial(layer.compare, form)


def compare_model(name: str) -> Facts:
    """Compare the tokens of three prompts with a shared beginning, computed twice, the second time from the cache."""
    from bench.random_model import SHAPES, write_model
    from kvblocks.engine import Engine, LoadedModel

    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(400, (length,), generator=generator).tolist() for length in (700, 30, 90)]
    prompts = [prompts[0], *(prompts[0][:600] + own for own in prompts[1:])]
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPES[name])
        for device in ("cpu", "cuda"):
            model = LoadedModel.load(folder, device=device, dtype="float32")
            engine = Engine(model, kv_cache_memory="256MiB")
            runs = [engine.generate(prompts, max_tokens=12, ignore_eos=True) for _ in range(2)]
            answers.append([completion.token_ids for run in runs for completion in run])
            num_cached = sum(completion.num_cached_tokens for completion in runs[1])
    same = sum(one == other for one, other in zip(*answers, strict=True))
    return {"is_right": same == len(answers[0]) and num_cached > 0, "same": same, "cached_tokens": num_cached}


class Layer:
    """A layer with random weights, and rows for it in bfloat16."""

    def __init__(self, mixer: "StateMixer", device: torch.device, num_tokens: int, num_seqs: int) -> None:
        self._mixer = mixer
        self._device = device
        generator = torch.Generator().manual_seed(0)
        tensors = {
            name: torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) > 1 else 5)
            for name, shape in mixer.shapes(256).items()
        }
        self._weights: Weights = mixer.load(tensors.__getitem__).weights
        rows = torch.randn(num_tokens, mixer.num_inputs, generator=generator).bfloat16()
        self._rows = {"scan": rows, "recur": rows[:num_seqs]}
        sizes = {"scan": 1, "recur": num_seqs}
        self._states: dict[str, States] = {
            form: tuple(torch.randn(size, *part.shape, generator=generator) / 8 for part in mixer.parts)
            for form, size in sizes.items()
        }

    def compare(self, form: str) -> Facts:
        """Return errors of outputs and states, and microseconds, for plain torch and for the package's kernels."""
        expected = self._run(form, torch.device("cpu"))
        missing = missing_kernels(self._mixer, self._device)
        facts: Facts = {"is_right": True, "kernels": missing}
        for way, uses in (("torch", without_kernels), ("kernels", ExitStack)):
            if way == "kernels" and missing is not None:
                break
            with uses():
                found = self._run(form, self._device)
                errors = [relative_error(one, other) for one, other in zip(found, expected, strict=True)]
                facts[way] = {"errors": errors} | self._time(form)
            facts["is_right"] &= max(errors) <= LARGEST_ERROR
        return facts

    def _given(self, form: str, device: torch.device) -> "tuple[Weights, Tensor, States]":
        weights = {name: value.to(device) for name, value in self._weights.items()}
        return weights, self._rows[form].to(device), tuple(part.to(device) for part in self._states[form])

    def _run(self, form: str, device: torch.device) -> "list[Tensor]":
        outputs, states = getattr(self._mixer, form)(*self._given(form, device))
        return [outputs, *states]

    def _time(self, form: str) -> Facts:
        if self._device.type != "cuda":
            return {}
        from bench.attention.timing import time_calls

        given = self._given(form, self._device)
        timing = time_calls([partial(getattr(self._mixer, form), *given)])
        return {"median_us": timing.median, "low_us": timing.low, "high_us": timing.high, "is_graph": timing.is_graph}


def missing_kernels(mixer: "StateMixer", device: torch.device) -> str | None:
    """Why a layer is computed by plain torch alone, or None if a package's kernels compute it."""
    from kvblocks.engine.model.hybrid import delta_kernels, mamba_kernels
    from kvblocks.engine.model.hybrid.mamba2 import Mamba2

    name, module = ("mamba_ssm", mamba_kernels) if isinstance(mixer, Mamba2) else ("fla", delta_kernels)
    if device.type != "cuda":
        return "not run: they need a GPU"
    return None if module.is_installed() else f"not run: {name} is not installed"


@contextmanager
def without_kernels() -> Iterator[None]:
    """Compute in plain torch, whatever is installed."""
    from kvblocks.engine.model.hybrid import delta_kernels, mamba_kernels

    with patch.object(delta_kernels, "is_installed", bool), patch.object(mamba_kernels, "is_installed", bool):
        yield


def relative_error(found: "Tensor", expected: "Tensor") -> float:
    """The root mean square error, relative to the expected values'."""
    expected = expected.double()
    return float((found.cpu().double() - expected).norm() / expected.norm())
