"""Count the kernels that a layer would launch on a GPU, for each model and kind of step, and print them as JSON.

test_launches.py starts it as a process of its own, without TRITON_INTERPRET. It needs no GPU: our kernels are recorded
(`bench.attention.recording`) instead of launched. An operator of torch counts as one launch, unless it only views or
allocates a tensor. (A matrix product of a library may be more than one.) The count is the difference between models of
three layers and of two, so it leaves out what all layers of a step share. `--torch`: with the row-wise kernels in plain
torch.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from engine.small_models import BLOCK_SIZE, EVEN, GEMMA3, converted, random_weights
from torch.utils._python_dispatch import TorchDispatchMode

from bench.attention.recording import record
from kvblocks.engine.attention.attention import StepAttention, TorchAttention
from kvblocks.engine.attention.batch import SequenceRows, StepBatch
from kvblocks.engine.attention.triton_attention import TritonAttention
from kvblocks.engine.model.architectures import QWEN3
from kvblocks.engine.run.forward import DecoderModel
from kvblocks.kernels.runs import SharedRuns

SMALL = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 96, "head_dim": 64, "windows": ()}
MODELS = {
    "Llama": replace(EVEN, **SMALL),
    "Qwen3": replace(EVEN, **SMALL, architecture=QWEN3),
    "Gemma 3": replace(GEMMA3, **SMALL),
}
DECODES = [SequenceRows([5], 40, [0, 1, 2]), SequenceRows([6], 36, [0, 1, 3])]
PROMPTS = [SequenceRows([5] * 20, 0, [4, 5]), SequenceRows([6] * 9, 11, [6, 7])]
STEPS = {"decode": DECODES, "prompts": PROMPTS, "decodes and prompts": DECODES + PROMPTS, "cascade": DECODES}
FREE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "lift_fresh")


class PlainStep:
    """A step that stores and attends by kernels, and does nothing else."""

    def __init__(self, step: StepAttention) -> None:
        self.store, self.attend = step.store, step.attend


class Launches(TorchDispatchMode):
    """Counts torch's launches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        schema = function._schema  # noqa: SLF001 - what says whether a result is a view
        is_view = any(result.alias_info and not result.alias_info.is_write for result in schema.returns)
        if not is_view and schema.name.removeprefix("aten::") not in FREE:
            self.names.append(schema.name)
        return function(*args, **kwargs or {})


def count(config, rows, *, is_cascade, is_plain):
    """Return a step's launches: ours, and torch's."""
    attention = TritonAttention()
    weights = converted(random_weights(config), torch.bfloat16)
    with patch.object(TritonAttention, "row_ops", TorchAttention.row_ops if is_plain else TritonAttention.row_ops):
        model = DecoderModel(config, weights, attention=attention)
    cache, batch = model.new_kv_cache(8, BLOCK_SIZE), StepBatch.build(rows, BLOCK_SIZE)
    runs = SharedRuns.build([([0, 1], 0, 2)], 2)
    with record("sm90") as recording, Launches() as launches, torch.inference_mode():
        step = attention.begin_cascade(batch, cache, runs) if is_cascade else attention.begin(batch, cache)
        model.compute(batch, PlainStep(step) if is_plain else step)
    return [launched.name for launched, _ in recording.launches], launches.names


def main(*arguments):
    """Print the launches of a layer, by model and kind of step."""
    torch.set_num_threads(1)
    is_plain, found = "--torch" in arguments, {}
    for name, config in MODELS.items():
        for kind, rows in STEPS.items():
            few, many = (
                count(replace(config, num_layers=layers), rows, is_cascade=kind == "cascade", is_plain=is_plain)
                for layers in (2, 3)
            )
            ours, others = (len(many[part]) - len(few[part]) for part in (0, 1))
            found[f"{name}, {kind}"] = {"ours": ours, "torch": others}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
