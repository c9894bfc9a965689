"""A step reads no values of tensors on the host. On a GPU each read would make the host wait.

The steps run on a CPU without the kernels; they make the same calls of torch as on a GPU. `test_decode_step` checks the
captured part of a step alone. Here whole steps run.
"""

import sys
import types

import pytest
import torch
from engine.run.test_decode_step import FAKE_KERNELS, TINY
from engine.small_models import converted, random_tokens, random_weights
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed")

from kvblocks.engine import Engine, LoadedModel, StepLimits
from kvblocks.engine.attention import cascade as cascade_module
from kvblocks.engine.attention import flash_attention as flash_attention_module
from kvblocks.engine.run.decode_step import run_in_place
from kvblocks.engine.run.device_runner import DeviceRunner
from kvblocks.kernels.table import CascadeThreshold

# Operators for which torch must read a tensor's numbers: for a number itself, or for a result's size.
READING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique", "unique_dim", "_unique2")
KERNELS = ("store", "decode", "extend", "cascade_decode", "share_decodes", "share_rows", "share_cascade", "own_parts")


class Unread(TorchDispatchMode):
    """Refuses every operator that reads a tensor's values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.name().split("::")[1].split(".")[0], kwargs or {}
        has_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        has_unknown_size = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in READING or has_mask or has_unknown_size:
            raise AssertionError(f"{function}: a value of a tensor is read")
        return function(*args, **kwargs)


class FakeOwn:
    seq_lens = None


def leave_out_kernels(monkeypatch):
    """Launches nothing. Attention returns the queries."""
    for name, fake in FAKE_KERNELS.items():
        monkeypatch.setattr(f"kvblocks.engine.attention.triton_attention.{name}", fake)
    for name in KERNELS:
        made = (lambda query, *_, **__: (query, None)) if name in ("decode", "extend", "cascade_decode") else None
        others = (lambda *_, **__: FakeOwn) if name == "own_parts" else (lambda *_, **__: None)
        monkeypatch.setattr(f"kvblocks.engine.attention.triton_attention.{name}", made or others)


def leave_out_flash_attn(monkeypatch):
    module = types.ModuleType("flash_attn")
    module.flash_attn_with_kvcache = module.flash_attn_varlen_func = lambda query, *_, **__: query
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(flash_attention_module, "DEVICE_TYPES", ("cuda", "cpu"))


def watch(engine, monkeypatch):
    """Watch every step, and every copy to the device, which must come from pinned memory."""
    run, kinds, to, pinned = engine.runner.run, [], torch.Tensor.to, []

    def refuse_devices(tensor, *args, **kwargs):
        if any(isinstance(value, torch.device | str) for value in (*args, *kwargs.values())):
            raise AssertionError("to: a tensor is copied to a device, not by `to_device`")
        return to(tensor, *args, **kwargs)

    def note(values, device):
        pinned.append(values)
        return to(values, device)

    for module in ("attention", "cascade"):
        monkeypatch.setattr(f"kvblocks.engine.attention.{module}.to_device", note)

    def run_watched(chunks, *score):
        with Unread(), monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", refuse_devices)
            logits = run(chunks, *score)
        kinds.append((max(chunk.num_tokens for chunk in chunks) > 1, len(chunks)))
        return logits

    engine.runner.run = run_watched
    return kinds, pinned


@pytest.mark.parametrize("kind", ["triton", "cascade", "8 bits", "flash-attn"])
def test_steps_read_no_tensor(monkeypatch, kind):
    torch.set_num_threads(1)
    leave_out_flash_attn(monkeypatch)
    leave_out_kernels(monkeypatch)
    weights = random_weights(TINY)
    is_flash = kind == "flash-attn"
    model = LoadedModel(TINY, converted(weights, torch.bfloat16) if is_flash else weights)
    size = 256 if is_flash else 16
    options = {"kv_cache_dtype": "fp8_e4m3"} if kind == "8 bits" else {}
    engine = Engine(model, num_blocks=40, block_size=size, attention="flash-attn" if is_flash else "triton", **options)
    if not is_flash:
        runner, planner = engine.runner, None
        if kind == "cascade":
            find = engine.manager.inspect.shared_prefixes
            threshold = CascadeThreshold(min_run_tokens=1, min_saved_share=0.0)
            planner = cascade_module.CascadePlanner(find, size, torch.device("cpu"), threshold)
        ways = {"scales": runner.kv_cache.scales, "capture": run_in_place, "cascade": planner}
        engine.runner = DeviceRunner(runner.model, 40, size, **ways)
    engine.limits = StepLimits(max_num_batched_tokens=40, max_num_seqs=4)
    kinds, pinned = watch(engine, monkeypatch)
    shared = random_tokens(TINY, 2 * size, seed=1)
    prompts = [shared, [*shared, 5], [*shared, 6, 7]]
    for _ in range(2):  # the second time from the cache, whose last token is computed once more and stored nowhere
        engine.generate(prompts, max_tokens=4, n=2, ignore_eos=True)
    assert {is_prompt for is_prompt, _ in kinds} == {True, False} and max(count for _, count in kinds) > 1
    if kind == "cascade":
        assert engine.runner.num_cascades > 0 and pinned


@pytest.mark.parametrize("has_buckets", [False, True])
def test_a_step_is_launched_without_reading_the_tokens_before(monkeypatch, has_buckets):
    """Requests come and go, so that the tokens before are another step's, in another order, and beside prompts."""
    torch.set_num_threads(1)
    leave_out_kernels(monkeypatch)
    model, answers, num_fed = LoadedModel(TINY, random_weights(TINY)), [], 0
    for overlap in (False, True):
        engine = Engine(model, num_blocks=80, attention="triton", overlap=overlap)
        engine.runner = DeviceRunner(engine.runner.model, 80, 16, capture=run_in_place if has_buckets else None)
        engine.limits = StepLimits(max_num_batched_tokens=40, max_num_seqs=5)
        launch = engine.stepper._launch  # noqa: SLF001

        def launch_watched(chunks, runner, after, drawn=None, *, launch=launch):
            nonlocal num_fed
            num_fed += drawn is not None
            with Unread():
                return launch(chunks, runner, after, drawn)

        engine.stepper._launch = launch_watched  # noqa: SLF001
        generations = []
        for number, max_tokens in enumerate((9, 3, 12, 5, 2, 7)):
            prompt = random_tokens(TINY, 3 + 2 * number, seed=number)
            options = {"temperature": 1.0, "seed": number} if number % 2 else {}
            generations += engine.submit(prompt, max_tokens=max_tokens, ignore_eos=True, **options)
            for _ in range(number % 3):
                engine.step()
        while engine.has_work:
            engine.step()
        answers.append([one.completion.token_ids for one in generations])
    assert answers[0] == answers[1] and num_fed > 8
    assert (engine.runner.num_replays > 0) == has_buckets


def test_what_the_watch_refuses():
    numbers = torch.arange(4)
    for reads in (
        lambda: bool(numbers.any()),
        numbers[0].item,
        lambda: numbers[numbers > 1],
        lambda: torch.repeat_interleave(numbers, numbers),
    ):
        with pytest.raises(AssertionError, match="is read"), Unread():
            reads()
