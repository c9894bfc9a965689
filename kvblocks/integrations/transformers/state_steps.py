"""How transformers' steps are cut and run for layers that keep states: its scheduler and model runner, on kvblocks.

A step ends a prompt's chunk where a state is to be saved. kvblocks makes room up to there (`Bookkeeping`), and the
scheduler takes no more tokens. After all calls that make room, the copies of states are taken. They are made just
before and after the forward pass. With caches without states nothing changes.
"""

from typing import Any

from transformers.generation.continuous_batching import scheduler
from transformers.generation.continuous_batching.model_runner import ModelRunner

from kvblocks.integrations.transformers.state_kinds import state_types

FULL = "full_attention"


class CuttingScheduler(scheduler.Scheduler):
    """A mixin that cuts prompts where states are saved.

    It comes before one of transformers' schedulers in the method order.
    """

    def _schedule_request(self, state: Any, request_tokens: Any, token_budget: int, *more: Any) -> Any:
        """Schedule a request, up to where it has slots."""
        most = self.cache.count_slots_ahead(state)
        return super()._schedule_request(
            state, request_tokens, token_budget if most is None else min(token_budget, most), *more
        )

    def _process_candidates(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule requests, and take the copies of states that go with the step."""
        result = super()._process_candidates(*args, **kwargs)
        self.cache.plan_states(result[0])
        return result


class StateModelRunner(ModelRunner):
    """Runs the model with the states of the step's sequences, and makes the copies of states."""

    def _forward_process_and_sample(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step, on the stream that transformers computes it on."""
        slots = self.cache.state_slots
        if slots is None:
            return super()._forward_process_and_sample(model, *args, **kwargs)
        with slots.step(model):
            return super()._forward_process_and_sample(model, *args, **kwargs)


def with_cuts(theirs: type) -> type:
    """Make a subclass of a scheduler of transformers that cuts prompts where states are saved."""
    return type(f"KVBlocks{theirs.__name__}", (CuttingScheduler, theirs), {})


def without_state_layers(group: Any) -> Any:
    """Wrap transformers' call that groups layers by type, so that layers that keep a state are in no group."""

    def group_attending(config: Any) -> dict[str, list[int]]:
        """Of each type of attention the numbers of its layers."""
        if not state_types(config):
            found: dict[str, list[int]] = group(config)
            return found
        return {FULL: [layer for layer, kind in enumerate(config.layer_types) if kind == FULL]}

    return group_attending
