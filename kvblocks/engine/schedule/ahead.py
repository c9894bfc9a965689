"""The step behind one whose tokens aren't known yet, planned while the device still computes that one.

What is planned is a decode step: each running request computes the token that the step before samples for it. The
request reserves a slot for it, as vLLM's async scheduler does for its placeholders. The token joins the sequence when
it is known, and only then takes the slot, so a block is cached only with tokens that are known.

A request whose unknown token ends it, such as a stop token, is computed once too often. Its blocks, the reserved slot
included, are given back when the token is known. Whoever gets them writes in a later step, which the device computes
later. So the KV of a token behind the end is in nobody's context, and is never cached.

Nobody is preempted for such a step. Where the pool hasn't a block for everybody who needs one, nothing is planned
before the tokens are known.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items

from kvblocks.engine.schedule.capacity import keeps_states
from kvblocks.engine.schedule.remembered import RememberedPrompts
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.step import ScheduledChunk
from kvblocks.errors import CorruptStateError
from kvblocks.manager import KVCacheManager


def may_plan(manager: KVCacheManager, remembered: RememberedPrompts | None) -> bool:
    """Whether steps can be planned ahead at all. O(groups).

    They can't where layers keep a state, since a checkpoint is taken of known tokens. Nor where next tokens are
    remembered, since a prompt is kept as it is before its answer goes on.
    """
    return remembered is None and not keeps_states(manager)


def plan(
    manager: KVCacheManager,
    running: Items[Request],
    waiting: Iterable[Request],
    step: Items[ScheduledChunk],
    budget: int,
) -> list[ScheduledChunk]:
    """Return the decodes behind `step`, with slots reserved; empty, and nothing has changed, if they can't be planned.

    running: the requests that a step could compute now. waiting: those that could be admitted to it. budget: how many
    tokens a step computes at most. They can be planned if `step` samples for all of the running requests, and the pool
    has a block for each that needs one. A request that has all its tokens once it has the one of `step` isn't computed
    any more. O(requests + new blocks).

    Samples of a prompt, prompts to score and prompts without an answer change as their step ends. So their step is read
    before anybody can cancel one of them. It is no planned step, and where they wait, none is planned.
    """
    if any(request.siblings or request.max_hit_tokens is not None or not request.max_tokens for request in waiting):
        return []
    unfinished = [(place, chunk.request) for place, chunk in enumerate(step) if chunk.request.finish_reason is None]
    going_on = [(place, request) for place, request in unfinished if request.num_output_tokens + 1 < request.max_tokens]
    if len(unfinished) < len(running) or len(going_on) > budget:
        return []
    sequences = [request.sequence for _, request in going_on]
    # The others' next token certainly fits into a block that they have.
    unsure = [sequence for sequence in sequences if sequence.num_computed_tokens >= sequence.fits_below]
    wanted = [manager.get_num_blocks_to_allocate(sequence, sequence.num_tokens + 1) for sequence in unsure]
    if sum(wanted) > manager.num_free_blocks:
        return []
    for sequence in unsure:
        if manager.allocate_slots(sequence, num_total_tokens=sequence.num_tokens + 1) is None:
            raise CorruptStateError(f"expected one free block for {sequence}, got none")
    copies = tuple([(source, destination) for _, source, destination in manager.take_copies()]) if going_on else ()
    chunks = []
    for place, request in going_on:  # the first one has the copies
        chunks.append(ScheduledChunk(request, request.sequence.num_tokens, 1, True, copies, None, place))  # noqa: FBT003
        copies = ()
    return chunks


def take_tokens(
    manager: KVCacheManager, step: Items[ScheduledChunk], token_ids: Items[int | None], planned: Items[ScheduledChunk]
) -> set[Request]:
    """Give the requests that go on in a planned step their tokens, with the slots that were reserved. Returns them.

    token_ids: of the chunks of `step`, which is known now. Blocks that get full are cached: their step was launched.
    Requests that have ended, or end with their token, are left out. O(requests).
    """
    going_on, sequences, tokens = set(), [], []
    for chunk in planned:
        token_id = None if chunk.source is None else token_ids[chunk.source]
        request = chunk.request
        if token_id is not None and request.finish_reason is None and token_id not in request.stop_token_ids:
            request.num_computed_tokens += step[chunk.source or 0].num_tokens
            going_on.add(request)
            sequences.append(request.sequence)
            tokens.append(token_id)
    if manager.append_step(sequences, tokens) is None:
        raise CorruptStateError("expected the slots that were reserved, got none")
    return going_on
