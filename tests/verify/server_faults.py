"""Faults of a prefix cache, put into a running server of ours: what a client sees is as if the manager had them.

The manager itself can't be made so wrong from outside. So each fault does to the KV what such a manager would have led
to: a block holds the KV of another context.
"""

import itertools


def _tampering(server, tamper):
    """Call tamper(engine, chunks) behind each step."""
    runner = server.engine.runner
    run = runner.run

    def run_and_tamper(chunks, *arguments):
        result = run(chunks, *arguments)
        tamper(server.engine, chunks)
        return result

    runner.run = run_and_tamper


def no_parent(server):
    """A block is found by its own tokens, whatever stands before it."""
    known = {}

    def tamper(engine, chunks):
        size = engine.manager.block_size
        for chunk in chunks:
            sequence = chunk.request.sequence
            tokens = sequence.token_ids()
            for index in range(chunk.start // size, (chunk.start + chunk.num_tokens) // size):
                prefix = tuple(tokens[: (index + 1) * size])
                block = sequence.block_ids[index]
                first, source = known.setdefault((sequence.salt, prefix[-size:]), (prefix, block))
                if first != prefix and source != block:
                    engine.runner.kv_cache.copy_blocks([(source, block)])

    _tampering(server, tamper)


def freed_early(server):
    """When a request ends, its blocks are given to the next one, although others have them too."""
    manager = server.engine.manager
    free = manager.free

    def free_and_spoil(sequence):
        blocks = sequence.block_ids
        free(sequence)
        held = {block for other in manager.sequences() for block in other.block_ids}
        shared = [block for block in blocks if block in held]
        if shared:
            source = next(block for block in range(manager.num_blocks) if block not in shared)
            server.engine.runner.kv_cache.copy_blocks([(source, shared[-1])])

    manager.free = free_and_spoil


def dead_step_stays_cached(server):
    """Of a request that was cancelled, the blocks that its last step was to write are found, but weren't written."""
    engine = server.engine
    cancel, other = engine.cancel, itertools.count()

    def cancel_and_spoil(generation):
        blocks = list(generation.request.sequence.block_ids)
        cancel(generation)
        if len(blocks) > 2:
            source = (blocks[0], blocks[-1])[next(other) % 2]
            engine.runner.kv_cache.copy_blocks([(source, block) for block in blocks[1:-1]])

    engine.cancel = cancel_and_spoil


def state_under_an_earlier_key(server):
    """A later state of a sequence takes the place of an earlier one, and is found as that."""
    runner = server.engine.runner
    copy_states, saved = runner.copy_states, {}

    def copy_and_spoil(copies):
        copies = list(copies)
        copy_states(copies)
        for copy in copies:
            if copy.kind == "save":
                earlier = saved.setdefault(copy.slot, copy)
                if earlier.position < copy.position:
                    copy_states([copy._replace(block_ids=earlier.block_ids)])
                saved[copy.slot] = copy

    runner.copy_states = copy_and_spoil


FAULTS = {
    no_parent: {"middles"},
    freed_early: {"foreign", "pressure"},
    dead_step_stays_cached: {"cancels"},
}
