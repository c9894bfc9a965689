"""Plans the next step before the tokens of the current one are known, while the device still computes it.

The planned step is a decode step: each running request computes the token that the current step samples for it. The
request reserves a slot for that token, as vLLM's async scheduler does for its placeholders. The token joins the
sequence once it is known, and only then takes the slot, so a block is cached only with known tokens.

A request whose unknown token turns out to end it, such as a stop token, is computed once too often. Its blocks, the
reserved slot included, are given back when the token is known. Their next owner writes to them in a later step, which
the device computes later. So the KV of a token after the end is in nobody's context, and is never cached.

Nobody is preempted for such a step. If the pool lacks a block for any request that needs one, nothing is planned until
the tokens are known.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items

from kvblocks import KVCacheManager
from kvblocks.engine.schedule.capacity import keeps_states
from kvblocks.engine.schedule.remembered import RememberedPrompts
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.step import ScheduledChunk
from kvblocks.errors import CorruptStateError


def may_plan(manager: KVCacheManager, remembered: RememberedPrompts | None) -> bool:
    """Whether steps can be planned ahead at all. O(groups).

    They can't if layers keep a state, since checkpoints need known tokens, nor if next tokens are remembered, since a
    prompt is kept as it is before its answer goes on.
    """
    return remembered is None and not keeps_states(manager)


def plan(
    manager: KVCacheManager,
    running: Items[Request],
    waiting: Iterable[Request],
    step: Items[ScheduledChunk],
    budget: int,
) -> list[ScheduledChunk]:
    """Plan the decodes after `step`, and reserve their slots. Empty, with nothing changed, if they can't be planned.

    running: the requests that a step could compute now. waiting: those that it could admit. budget: the most tokens of
    a step. The decodes can be planned if `step` samples for all running requests, and the pool has a block for each
    that needs one. A request that is complete with the token of `step` isn't computed any more. O(requests + new
    blocks).

    Several samples of a prompt, prompts to score and prompts without an answer change when their step ends, so that
    step has to be read before one of them can be cancelled. It is never a planned step, and while such a request waits,
    no step is planned.
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
    """Give the requests that go on in a planned step their tokens and reserved slots. Returns these requests.

    token_ids: the tokens of the chunks of `step`, which are known now. Blocks that become full are cached, since their
    step was launched. Requests that have ended, or end with their token, are left out. O(requests).
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
