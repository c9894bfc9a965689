"""Decides which part of a long prompt a step computes. A prompt is long if its uncached rest takes more than one step.

A step computes a part of at most one long prompt. Running long prompts take turns, so a step takes about as long
however many there are. Their number is limited, since a prompt that takes turns with k others takes about k + 1 times
as long. Long prompts beyond the limit wait for a place, and shorter prompts pass them. One salt gets at most all places
but one, so that a tenant with a long prompt needn't wait for all of another tenant's.

*By layers*, if the runner can: the long prompt whose turn it is has an open chunk (`OpenChunk`), and a step computes
either a slice of it, or a part of each other request. A slice is short, so a new request, which gets the next step,
waits little. Running requests get a step whenever the slices since their last one took about as long as
`max_num_chunk_tokens` tokens. After each step of the others comes a slice, so a long prompt gets at least every other
step. The rest of the prompt after the chunk, at least one token, is computed in steps of the others, like a short
prompt. Those steps sample, fork and score, so a prompt to score is never computed by layers.

*By tokens*, otherwise: a step may leave out the long prompt, and so end sooner, if a waiting request gets its first
chunk instead, but at most every other step. So a running long prompt gets a chunk at least once in 2 * (running long
prompts) steps.

All this takes blocks. If the pool may have too few for what runs, the step computes all running requests by tokens, the
oldest first. Then the youngest can be preempted for older ones, as without long prompts.
"""

from collections.abc import Sequence as Items

from kvblocks import KVCacheManager
from kvblocks.engine.schedule.capacity import fitting_tokens
from kvblocks.engine.schedule.open_chunk import OpenChunk
from kvblocks.engine.schedule.remembered import RememberedPrompts
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.step import ScheduledChunk, StepLimits

_SLICES = 4
"""About how many slices take as long as `max_num_chunk_tokens` tokens. A new request waits for one slice."""


class LongPrompts:
    """The turns of running long prompts, whose sequences are `manager`'s. remembered: the scheduler's.

    num_layers: the layers of the model if chunks can be computed by layers, else 1.

    Attributes: postponed, in the current step: the prompt whose turn it is, if it is computed only when no new request
    is admitted; else empty. open: the chunk that is being computed by layers.
    """

    def __init__(
        self, manager: KVCacheManager, remembered: RememberedPrompts | None = None, num_layers: int = 1
    ) -> None:
        self._manager = manager
        self._remembered = remembered
        self._block_size = manager.block_size
        self.num_layers = num_layers
        self.postponed: list[Request] = []
        self.open: OpenChunk | None = None
        self._turn: Request | None = None  # the last one whose turn it was
        self._gave_way = False  # at that turn; with an open chunk: in the last step
        self._num_sliced_tokens = 0.0  # what slices since the last step of others are worth

    def begin_step(self, running: list[Request], limits: StepLimits, *, others_wait: bool) -> list[Request]:
        """Return the running requests that the step computes first, in order.

        running: the requests that can be computed, the oldest first. others_wait: whether the queue has requests. Gives
        up remembered prompts if the pool lacks room. O(running requests).
        """
        self.postponed, gave_way = [], self._gave_way
        self._gave_way = False
        parts = _in_progress(running)
        if not parts or not self._has_room(self._most_blocks(running, limits)):
            return running
        if self._turn not in parts:
            self._turn = parts[0]
        elif not gave_way:
            self._turn = parts[(parts.index(self._turn) + 1) % len(parts)]
        if others_wait and not gave_way:
            self.postponed = [self._turn]
        left_out = [request for request in parts if request is not self._turn] + self.postponed
        return [request for request in running if request not in left_out]

    def _most_blocks(self, running: Items[Request], limits: StepLimits) -> int:
        """The most blocks of a group that a step of all these requests takes. O(running requests)."""
        size, most = self._block_size, limits.num_step_tokens
        return sum([(min(request.num_left_tokens, most) + size - 2) // size + 1 for request in running])

    def give_way(self, *, to_new: bool) -> bool:
        """Note whether the step computes a new request instead of the postponed prompt. Returns `to_new`. O(1)."""
        self._gave_way = to_new
        return to_new

    def next_by_layers(self, computable: Items[Request], limits: StepLimits) -> Request | None:
        """Return the request whose chunk is open, or should be opened now; None if the step computes by tokens.

        computable: the running requests that aren't loading. Gives up remembered prompts if the pool lacks room.
        O(running requests).
        """
        if self.open is not None:
            return self.open.request
        if not self._has_slices(limits):
            return None
        parts = [request for request in computable if self._is_by_layers(request, limits)]
        if not parts:
            return None
        turn = parts[(parts.index(self._turn) + 1) % len(parts) if self._turn in parts else 0]
        num_blocks = (self._num_open_tokens(turn, limits) - 2) // self._block_size + 2
        others = [request for request in computable if request not in parts]
        return turn if self._has_room(num_blocks + self._most_blocks(others, limits)) else None

    def beside(self, computable: Items[Request], limits: StepLimits) -> list[Request]:
        """Return the running requests to compute before the next slice, in order, while a chunk is open or about to be.

        Empty until the slices since their last step took as long as a step. Of the long prompts that are computed by
        tokens, it contains only the oldest. O(running requests).
        """
        num_next, own = (0.0, None) if self.open is None else (self.open.num_worth_tokens, self.open.request)
        if self._num_sliced_tokens <= max(0.0, limits.num_step_tokens - num_next):
            return []
        others = [request for request in computable if request is not own and not self._is_by_layers(request, limits)]
        left_out = _in_progress(others)[1:]
        return [request for request in others if request not in left_out]

    @property
    def may_give_way(self) -> bool:
        """Whether others may be computed before the next slice, that is, whether the last step was a slice. O(1)."""
        return not self._gave_way

    def note_others(self, *, advanced: bool) -> None:
        """Note that the step computes other requests, and no slice. advanced: whether these include those of `beside`.

        O(1).
        """
        self._gave_way = True
        if advanced:
            self._num_sliced_tokens = 0.0

    def take_slice(self, computable: Items[Request], limits: StepLimits) -> ScheduledChunk | None:
        """Return the next slice of the open chunk, or open a chunk, with slots, and return its first slice.

        None, with nothing changed, if no chunk can be opened. Arguments and cost are those of `next_by_layers`, plus
        O(new blocks).
        """
        if self.open is None:
            self.open = self._begin(self.next_by_layers(computable, limits), limits)
        if self.open is None:
            return None
        self._gave_way = False
        self._num_sliced_tokens += self.open.num_worth_tokens
        return ScheduledChunk.slice_of(self.open)

    def end_slice(self, part: OpenChunk) -> bool:
        """Note that a slice was computed. If it was the last one, cache the chunk's blocks and return True.

        O(blocks).
        """
        part.num_done_layers = part.layers.stop
        if part.is_done:
            self._manager.cache_blocks(part.request.sequence, part.start + part.num_tokens)
            self.open = None
        return part.is_done

    def drop(self, request: Request) -> OpenChunk | None:
        """Drop the open chunk if it belongs to the request, and return it, else None. O(1)."""
        part = self.open
        if part is None or part.request is not request:
            return None
        self.open = None
        return part

    def free(self, request: Request) -> None:
        """Free a request's blocks. If a chunk of it is open, it is dropped, and nothing of it is cached. O(blocks)."""
        part = self.drop(request)
        if part is None:
            self._manager.free(request.sequence)
        else:
            self._manager.abort(request.sequence, part.start)

    def _begin(self, request: Request | None, limits: StepLimits) -> OpenChunk | None:
        """Open a request's next chunk. It is its turn."""
        if request is None:
            return None
        start, num_layers = request.sequence.num_computed_tokens, self.num_layers
        num_tokens = fitting_tokens(self._manager, request, self._num_open_tokens(request, limits))
        if self._manager.allocate_slots(request.sequence, num_tokens, delay_cache_blocks=True) is None:
            return None  # there is room, but not for this tenant
        self._turn = request
        num_slice_layers = max(1, limits.num_step_tokens * num_layers // (_SLICES * num_tokens))
        copies = tuple([(source, destination) for _, source, destination in self._manager.take_copies()])
        return OpenChunk(request, start, num_tokens, copies, num_layers, num_slice_layers)

    def _num_open_tokens(self, request: Request, limits: StepLimits) -> int:
        """The tokens of a request's next open chunk: without its last one, and no layer takes longer than a step."""
        most = min(limits.max_num_batched_tokens, limits.num_step_tokens * self.num_layers)
        return min(most, request.num_left_tokens - 1)

    def _has_room(self, num_blocks: int) -> bool:
        """Whether so many blocks of each group are free. Gives up remembered prompts for it."""
        while num_blocks * len(self._manager.groups) > self._manager.num_free_blocks:
            if self._remembered is None or not self._remembered.give_up():
                return False
        return True

    def _has_slices(self, limits: StepLimits) -> bool:
        """Whether any chunk may be computed by layers. O(1)."""
        return self.num_layers > 1 and limits.num_step_tokens < limits.max_num_batched_tokens

    def _is_by_layers(self, request: Request, limits: StepLimits) -> bool:
        """Whether a request's next chunk is computed by layers if there is room. O(1)."""
        if not request.is_long or not self._has_slices(limits):
            return False
        return request.num_left_tokens > limits.num_step_tokens and request.max_hit_tokens is None

    def has_place(self, request: Request, running: Items[Request], limits: StepLimits) -> bool:
        """Whether a waiting long prompt may run beside those that run. O(running requests)."""
        salts = [other.sequence.salt for other in _in_progress(running)]
        most, own = limits.max_num_partial_prefills, salts.count(request.sequence.salt)
        return len(salts) < most and (own < most - 1 or not own)


def _in_progress(running: Items[Request]) -> list[Request]:
    """The long prompts of which more than one token is left to compute. O(running requests)."""
    return [request for request in running if request.is_long and request.num_left_tokens > 1]
