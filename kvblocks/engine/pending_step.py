"""A step that was launched, and whose tokens weren't read yet."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvblocks.engine.generation import Generation
from kvblocks.engine.sampling.batch_sampler import BegunDraws
from kvblocks.engine.sampling.prompt_scores import Scorer
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.step import ScheduledChunk


@dataclass(eq=False, slots=True)
class PendingStep:
    """What has to be known of a launched step to go on from it.

    chunks: as they were scheduled. generations: those that get a token, chunk by chunk. scorer: of prompts. start_s:
    when it was launched, or when the device was done with the step before, if that is later; on `time.perf_counter`.
    """

    chunks: Sequence[ScheduledChunk]
    generations: Sequence[Generation]
    draws: BegunDraws
    scorer: Scorer | None
    start_s: float

    @property
    def may_be_followed(self) -> bool:
        """Whether the next step can be launched before the tokens of this one are known. O(requests).

        This is the rule for what overlaps; `schedule.ahead` adds what the scheduler must know. All of this must hold:

        - Each chunk ends with a token for its own request. So there is no part of a prompt, no prompt without an
          answer, no samples to fork, and no prompt to score.
        - The tokens are final on the device. So none comes with logarithms, none may have to be drawn again, and no
          sampler has failed.
        - How the next tokens are drawn doesn't depend on these. So there are no penalties, and no form of the text.
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
    def starts(self) -> dict[Request, int]:
        """How many tokens of each request were written before this step. O(requests)."""
        return {chunk.request: chunk.start for chunk in self.chunks if chunk.request.finish_reason is None}
