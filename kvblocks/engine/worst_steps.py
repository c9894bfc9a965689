"""How much memory steps take beside the KV cache, measured by computing the largest ones.

A share of a GPU's memory has to cover all that an engine takes in addition to its weights: activations, logits, the
memory of CUDA graphs, and what libraries keep. So the steps that take most are first computed with a small cache, and
the real cache gets what they leave of the share. vLLM does the same.

Two things aren't measured: block tables of long contexts (some MB), and plain torch's copies of K and V of contexts
that are longer than a step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from kvblocks import KVCacheManager, Plan
from kvblocks.engine.intake import Intake
from kvblocks.engine.model.layer_attention import LayerLocation
from kvblocks.engine.options import GenerationOptions
from kvblocks.engine.run.backends import Backend
from kvblocks.engine.run.cache_size import size_cache
from kvblocks.engine.run.memory import measure_taken
from kvblocks.engine.run.runner import LoadedModel, ModelRunner
from kvblocks.engine.sampling.batch_sampler import BatchSampler
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.schedule.step import StepLimits
from kvblocks.engine.stepper import Stepper
from kvblocks.errors import InvalidArgumentError

_GENERATED = 2
"""Tokens of each answer: one from the prompt's step, and one from a decode step."""


@dataclass(frozen=True)
class WorstSteps:
    """The largest steps of a model within limits. backend: the result of `Backend.prepared`."""

    model: LoadedModel
    backend: Backend
    block_size: int
    limits: StepLimits

    def plan_cache(self, num_blocks: int | None, memory: float | str | None, num_state_slots: int | None) -> Plan:
        """Plan the KV cache of an engine that computes such steps.

        Arguments and errors are those of `size_cache`. Calls `measure` if the cache gets a share of a GPU's memory.
        """
        layout = self.backend.plan_cache(self.model, self.block_size)
        return size_cache(layout, num_blocks, memory, num_state_slots, self.model.device, self.measure)

    def measure(self) -> int:
        """Measure how many bytes of the model's device these steps take in addition to weights and cache.

        Computes them, which compiles kernels and captures CUDA graphs. Keeps nothing. Raises InvalidArgumentError if
        they don't fit into the free memory.
        """
        most = self.limits.max_num_batched_tokens, self.limits.max_num_seqs
        try:
            plan = self._small_cache()
            taken = measure_taken(lambda: self._compute(plan), self.model.device)
        except (torch.OutOfMemoryError, InvalidArgumentError) as error:
            raise InvalidArgumentError(
                f"limits: expected steps that fit beside the model's weights, got max_num_batched_tokens={most[0]} and"
                f" max_num_seqs={most[1]}: {error}"
            ) from error
        return max(0, taken - plan.num_bytes)

    def batches(self) -> Iterator[tuple[list[int], GenerationOptions]]:
        """Yield the lengths of prompts that run together, and how their tokens are drawn.

        First a step with the most tokens and the most rows of logits, then one long prompt, and then a decode step of
        each size whose CUDA graph has memory of its own.
        """
        num_tokens, num_seqs = self.limits.max_num_batched_tokens, self.limits.max_num_seqs
        least, num_larger = divmod(num_tokens, num_seqs)
        drawn = GenerationOptions(
            max_tokens=_GENERATED, ignore_eos=True, temperature=1.0, top_p=0.9, logprobs=1, seed=0
        )
        greedy = GenerationOptions(max_tokens=_GENERATED, ignore_eos=True)
        room = self.model.config.max_position_embeddings - _GENERATED
        yield [min(room, least + (index < num_larger)) for index in range(num_seqs)], drawn
        yield [min(room, num_tokens)], greedy
        size = 1 << (num_seqs - 1).bit_length() >> 1
        while size:
            yield [1] * size, greedy
            size >>= 1

    def _small_cache(self) -> Plan:
        layout = self.backend.plan_cache(self.model, self.block_size)
        num_groups = sum(group.has_table for group in layout.groups)
        needed = max(
            sum(-(-(length + _GENERATED) // self.block_size) for length in lengths) for lengths, _ in self.batches()
        )
        # One more for each group: some kinds of layers need a block of their own.
        return size_cache(layout, (needed + 1) * num_groups, None, None, self.model.device)

    def _compute(self, plan: Plan) -> ModelRunner:
        """Compute the batches, and return the runner, which has the graphs."""
        manager = KVCacheManager(plan.num_blocks, groups=plan.groups, enable_caching=False)
        located = [LayerLocation(*location) for location in plan.layer_groups]
        runner = self.backend.make_runner(self.model, manager, located)
        limits = replace(self.limits, watermark=0.0)
        most = self.model.config.max_position_embeddings
        scheduler = Scheduler(manager, most, limits, num_layers=runner.num_slice_layers)
        intake, stepper = Intake(self.model, scheduler), Stepper(scheduler, BatchSampler(runner.draw_tokens))
        for lengths, options in self.batches():
            for length in lengths:
                stepper.add(intake.read([0] * length, options, "prompt"))
            while scheduler.has_work:
                stepper.step(runner)
        return runner
