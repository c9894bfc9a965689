"""Which part of a long prompt a step computes. A prompt is long if one step can't compute all of it that isn't cached.

A step computes a part of one running long prompt at most. The running ones take turns, so a step lasts about as long
however many they are. How many run is limited, since a prompt that takes turns with k others takes k times as long.
Shorter prompts pass those that wait for a place. One salt gets all places but one, so a tenant with a long prompt need
not wait for all of another's.

*By layers*, if the runner can: the long prompt whose turn it is has an open chunk (`OpenChunk`), and a step computes
either a slice of it, or a part of each other request. A slice is so short that a new request, which gets the next step,
waits little. Running requests get a step whenever the slices since their last one took about as long as
`max_num_chunk_tokens` tokens. After every step of others comes a slice, so a long prompt gets every other step at
least. What a chunk leaves of its prompt, at least one token, is computed by steps of others as a short prompt is. These
sample, fork and score; so a prompt that is to be scored is never computed by layers.

*By tokens*, otherwise: at most every other step computes no part of a long prompt, if a waiting request gets its first
chunk instead: that step is over sooner. So a running long prompt gets a chunk in each 2 * (running long prompts) steps
at least.

All this needs blocks. If the pool may have too few for what runs, the step computes all running requests by tokens, the
oldest first. So the youngest can be preempted for older ones, as without long prompts.
"""

from collections.abc import Sequence as Items

from kvblocks.engine.schedule.capacity import fitting_tokens
from kvblocks.engine.schedule.open_chunk import OpenChunk
from kvblocks.engine.schedule.remembered import RememberedPrompts
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.step import ScheduledChunk, StepLimits
from kvblocks.manager import KVCacheManager

_SLICES = 4
"""About how many slices take as long as `max_num_chunk_tokens` tokens: a new request waits for one of them."""


class LongPrompts:
    """The turns of running long prompts, whose sequences are `manager`'s. remembered: as of the scheduler.

    num_layers: of the model, if chunks can be computed by layers; else 1.

    Attributes: postponed, in the present step, the one whose turn it is, if it is to be computed only if no new request
    is; else empty. open: the chunk that is being computed by layers.
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

        running: those that can be computed, the oldest first. others_wait: whether the queue has requests. Gives up
        remembered prompts if the pool lacks room. O(running).
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
        """Note whether the step computes a new request instead of the one postponed. Returns the same. O(1)."""
        self._gave_way = to_new
        return to_new

    def next_by_layers(self, computable: Items[Request], limits: StepLimits) -> Request | None:
        """Return whose chunk is open, or else whose next chunk is to be opened now; None: the step is by tokens.

        computable: the running requests that aren't loading. Gives up remembered prompts if the pool lacks room.
        O(running requests).
        """
        if self.open is not None:
            return self.open.request
        parts = [request for request in computable if self._is_by_layers(request, limits)]
        if not parts:
            return None
        turn = parts[(parts.index(self._turn) + 1) % len(parts) if self._turn in parts else 0]
        num_blocks = (self._num_open_tokens(turn, limits) - 2) // self._block_size + 2
        others = [request for request in computable if request not in parts]
        return turn if self._has_room(num_blocks + self._most_blocks(others, limits)) else None

    def beside(self, computable: Items[Request], limits: StepLimits) -> list[Request]:
        """Return which running requests are computed before the next slice, in order, while a chunk is or gets open.

        None before the slices since their last step are worth a step. Of the long prompts that are computed by tokens
        it is the oldest one. O(running requests).
        """
        num_next, own = (0.0, None) if self.open is None else (self.open.num_worth_tokens, self.open.request)
        if self._num_sliced_tokens <= max(0.0, limits.num_step_tokens - num_next):
            return []
        others = [request for request in computable if request is not own and not self._is_by_layers(request, limits)]
        left_out = _in_progress(others)[1:]
        return [request for request in others if request not in left_out]

    @property
    def may_give_way(self) -> bool:
        """Whether others may be computed before the next slice: the last step was a slice. O(1)."""
        return not self._gave_way

    def note_others(self, *, advanced: bool) -> None:
        """Note that the step computes others, and not a slice. advanced: whether it had those of `beside`. O(1)."""
        self._gave_way = True
        if advanced:
            self._num_sliced_tokens = 0.0

    def take_slice(self, computable: Items[Request], limits: StepLimits) -> ScheduledChunk | None:
        """Return the next slice of the open chunk, or the first one of a chunk that this opens, with slots.

        None, with nothing changed, if no chunk can be opened. Arguments and costs as of `next_by_layers`, and O(new
        blocks).
        """
        if self.open is None:
            self.open = self._begin(self.next_by_layers(computable, limits), limits)
        if self.open is None:
            return None
        self._gave_way = False
        self._num_sliced_tokens += self.open.num_worth_tokens
        return ScheduledChunk.slice_of(self.open)

    def end_slice(self, part: OpenChunk) -> bool:
        """Note that a slice was computed, and cache the chunk's blocks if it was the last one. Returns whether it was.

        O(blocks).
        """
        part.num_done_layers = part.layers.stop
        if part.is_done:
            self._manager.cache_blocks(part.request.sequence, part.start + part.num_tokens)
            self.open = None
        return part.is_done

    def drop(self, request: Request) -> OpenChunk | None:
        """Drop the open chunk if it is the request's. Returns it; None if it isn't. O(1)."""
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

    def _is_by_layers(self, request: Request, limits: StepLimits) -> bool:
        """Whether a request's next chunk is computed by layers if there is room. O(1)."""
        step = limits.num_step_tokens
        if self.num_layers == 1 or step == limits.max_num_batched_tokens:
            return False
        return request.is_long and request.num_left_tokens > step and request.max_hit_tokens is None

    def has_place(self, request: Request, running: Items[Request], limits: StepLimits) -> bool:
        """Whether a waiting long prompt may run beside those that run. O(running requests)."""
        salts = [other.sequence.salt for other in _in_progress(running)]
        most, own = limits.max_num_partial_prefills, salts.count(request.sequence.salt)
        return len(salts) < most and (own < most - 1 or not own)


def _in_progress(running: Items[Request]) -> list[Request]:
    """The long prompts of which more than one token is left to compute. O(running requests)."""
    return [request for request in running if request.is_long and request.num_left_tokens > 1]
