"""A step that has been launched, and whose tokens haven't been read yet."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvblocks.engine.generation import Generation
from kvblocks.engine.sampling.batch_sampler import BegunDraws
from kvblocks.engine.sampling.prompt_scores import Scorer
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.step import ScheduledChunk


@dataclass(eq=False, slots=True)
class PendingStep:
    """A launched step: what is needed to read its tokens, or to launch the next step before that.

    chunks: as they were scheduled. generations: those that get a token, chunk by chunk. scorer: scores prompts, if any
    asked for it. start_s: when it was launched, or when the device finished the previous step, if that is later; by
    `time.perf_counter`. took_s: how long it took, if it had ended when it was launched, as on a CPU. ended_unseen:
    whether it ended while the caller did something else, so that nobody knows how long it took.
    """

    chunks: Sequence[ScheduledChunk]
    generations: Sequence[Generation]
    draws: BegunDraws
    scorer: Scorer | None
    start_s: float
    took_s: float | None = None
    ended_unseen: bool = False

    @property
    def may_be_followed(self) -> bool:
        """Whether the next step can be launched before the tokens of this one are known. O(requests).

        This is the model side's rule for overlapping; `schedule.ahead` adds the scheduler's conditions. All of these
        must hold:

        - Each chunk ends with a token for its own request. This excludes partial prompts, prompts without an answer,
          samples to fork, and prompts to score.
        - The tokens are final on the device. This excludes log probabilities, draws that may have to be repeated, and
          failed samplers.
        - How the next tokens are drawn doesn't depend on these. This excludes penalties and grammars.
        """
        return (
            self.scorer is None
            and self.draws.tokens is not None
            and len(self.generations) == len(self.chunks)
            and all(chunk.samples for chunk in self.chunks)
            and not any(generation.sampler.needs_tokens for generation in self.generations)
        )

    @property
    def is_wanted(self) -> bool:
        """Whether any of its requests is unfinished. O(requests)."""
        return any(chunk.request.finish_reason is None for chunk in self.chunks)

    @property
    def starts(self) -> dict[tuple[Request, int], int]:
        """For each unfinished request, how many of its tokens were computed before this step. O(requests).

        As `written_tokens` has them.
        """
        unfinished = [chunk for chunk in self.chunks if chunk.request.finish_reason is None]
        return {(chunk.request, chunk.request.num_preemptions): chunk.start for chunk in unfinished}
