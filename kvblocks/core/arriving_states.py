"""States that loads bring: a sequence that loads waits for the checkpoint at the loads' end.

The blocks that the load writes have two owners. One is the state that the sequence waits for, since its slot is
restored from them. The other is a waiting save, so that the checkpoint is found as soon as the loaded prefix is cached.
The sequence also owns its hit's checkpoint, to which it goes back if the loads fail.
"""

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.live_states import ArrivingState, LiveState, States, WaitingSave
from kvblocks.core.longest_hit import HitParts
from kvblocks.core.pool import BlockPool
from kvblocks.core.sequence import Sequence
from kvblocks.errors import SequenceStateError


def begin_arriving(
    pool: BlockPool, states: States, sequence: Sequence, parts: HitParts, blocks: list[KVCacheBlock]
) -> LiveState:
    """Give a sequence a slot whose state loads bring. blocks: new ones for the checkpoint, if one is brought.

    The sequence owns the blocks of the device's checkpoints already. O(blocks).
    """
    loads = parts.loads
    assert loads is not None, f"{sequence}: loads nothing"
    fallback = [] if parts.checkpoint is None else parts.checkpoint.blocks
    there = blocks if loads.arriving is None else loads.arriving.blocks
    state = states.begin_arriving(sequence, ArrivingState(loads.start, loads.end, there, fallback))
    if blocks:
        pool.touch(blocks)
        state.waiting.append(WaitingSave(loads.end, blocks, is_likely_end=True))
    for checkpoint in (parts.checkpoint, loads.arriving):
        if checkpoint is not None:
            checkpoint.is_likely_end = True
            state.made.append(checkpoint)
    return state


def check_child(sequence: Sequence, state: LiveState) -> None:
    """Raise SequenceStateError if a sequence that loads can't be forked: tokens after the loads aren't computed yet."""
    if state.arriving is not None and sequence.num_computed_tokens != state.arriving.end:
        raise SequenceStateError(
            f"fork: expected a loading sequence with slots up to the end of its loads, at token {state.arriving.end},"
            f" since the tokens after them aren't computed; got {sequence}"
        )


def fork_arriving(pool: BlockPool, states: States, state: LiveState, child: Sequence) -> LiveState:
    """Give the child of a sequence that loads a slot of its own, to be restored from the same checkpoint. O(blocks)."""
    arriving = state.arriving
    assert arriving is not None, "no state is on its way"
    copy = states.begin_arriving(
        child, ArrivingState(arriving.start, arriving.end, [*arriving.blocks], [*arriving.fallback])
    )
    copy.waiting += [
        WaitingSave(save.position, save.blocks, is_likely_end=save.is_likely_end)
        for save in state.waiting
        if save.position == arriving.end
    ]
    for blocks in copy.tables():
        pool.touch(blocks)
    return copy


def end_arriving(pool: BlockPool, states: States, state: LiveState) -> None:
    """Have the slot restored from the checkpoint that has arrived. O(blocks + copies)."""
    arriving, state.arriving = state.arriving, None
    if arriving is not None:
        pool.release_table(arriving.fallback)
        states.restart(state, arriving.end, arriving.blocks)


def leave_arriving(pool: BlockPool, state: LiveState, num_tokens: int) -> list[KVCacheBlock] | None:
    """Stop waiting for a state, because the sequence goes back to `num_tokens` tokens.

    If it goes back to the end of its hit, returns the blocks of the hit's checkpoint, which the sequence keeps;
    otherwise returns None. O(blocks).
    """
    arriving, state.arriving = state.arriving, None
    if arriving is None:
        return None
    pool.release_table(arriving.blocks)
    if num_tokens == arriving.start:
        return arriving.fallback
    pool.release_table(arriving.fallback)
    return None
