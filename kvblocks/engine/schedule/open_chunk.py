"""A large chunk of a long prompt that steps compute a few layers at a time, in slices.

A step that computes 64 tokens of a prompt reads all weights for them. A chunk of 512 tokens reads the weights once for
eight times as many, but takes eight times as long. So such a chunk stays open over many steps: each slice takes it
through the next layers, and other requests have steps of their own in between.

Nobody may read a token's KV before all layers have written it. So the chunk's slots are allocated delayed: its blocks
are cached when the last slice is complete. When the request ends or loses its blocks, the chunk is dropped. A step is
over before the next one is scheduled, so nothing writes to these blocks afterwards.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvblocks.engine.schedule.request import Request


@dataclass(eq=False, slots=True)
class OpenChunk:
    """The next `num_tokens` tokens of a running request, from position `start`, with slots allocated.

    copies: pairs of block ids to copy in the first slice, as in a `ScheduledChunk`. num_layers: the layers of the
    model. num_slice_layers: the layers of a slice; the last slice may have fewer. num_done_layers: the layers of
    completed slices. seconds: how long these took. rest: an iterator that computes one layer per advance; None before
    the first slice. Only a runner sets and advances it.
    """

    request: Request
    start: int
    num_tokens: int
    copies: tuple[tuple[int, int], ...]
    num_layers: int
    num_slice_layers: int
    num_done_layers: int = 0
    seconds: float = 0.0
    rest: Iterator[None] | None = None

    @property
    def layers(self) -> range:
        """The layers of the next slice. Empty if all are done. O(1)."""
        return range(self.num_done_layers, min(self.num_done_layers + self.num_slice_layers, self.num_layers))

    @property
    def num_worth_tokens(self) -> float:
        """How many tokens, computed through all layers, take about as long as the next slice. O(1)."""
        return self.num_tokens * len(self.layers) / self.num_layers

    @property
    def is_done(self) -> bool:
        """Whether all layers are done. O(1)."""
        return self.num_done_layers == self.num_layers
