"""An engine whose steps are watched: slots that no row may see are NaN during a step, and its logits are kept."""

import torch
from model.sight import first_seen


class Watch:
    """Keeps the logits that an engine samples from, by the tokens before them, and spoils what a step must not read.

    logits: by the tokens of a sequence, one row for each token sampled. num_spoiled_slots: how many slots that held
    something were spoiled, in all steps together.
    """

    def __init__(self, engine):
        self.engine = engine
        self.logits = {}
        self.num_spoiled_slots = 0
        runner = engine.runner
        run, forward = runner.run, runner.model.forward
        chunks_of_step = []

        def watched_run(chunks, score=None):
            chunks_of_step[:] = chunks
            logits = run(chunks, score)
            sampling = [chunk for chunk in chunks if chunk.samples]
            for chunk, row in zip(sampling, logits, strict=True):
                self.logits.setdefault(tuple(chunk.request.sequence.token_ids()), row.clone())
            engine.manager.check()
            return logits

        def watched_forward(batch, kv_cache, score=None):
            tensors = (*kv_cache.keys, *kv_cache.values)
            saved = [tensor.clone() for tensor in tensors]
            seen = self.seen_slots(chunks_of_step)
            self.num_spoiled_slots += int((saved[0][~seen] != 0).any(-1).any(-1).sum())
            for tensor in tensors:
                tensor[~seen] = torch.nan
            slots = None if kv_cache.states is None else kv_cache.states.slots
            if slots is not None:
                unused = [slot for slot in range(len(slots)) if slot not in batch.state_rows.slots]
                kept = slots[unused].clone()
                slots[unused] = 255  # NaN in every dtype
            logits = forward(batch, kv_cache, score)
            if slots is not None:
                slots[unused] = kept
            assert not logits.isnan().any()
            for tensor, before in zip(tensors, saved, strict=True):
                tensor[~seen] = before[~seen]
            return logits

        runner.run, runner.model.forward = watched_run, watched_forward

    def seen_slots(self, chunks):
        """bool [num_blocks, block_size]: what some row of the step sees, in some group."""
        manager, block_size = self.engine.manager, self.engine.runner.kv_cache.block_size
        seen = torch.zeros(manager.num_blocks, block_size, dtype=torch.bool)
        for chunk in chunks:
            for group, kind in enumerate(manager.groups):
                if not kind.has_table:
                    continue
                first = first_seen(kind, chunk.start)
                positions = torch.arange(first, chunk.start + chunk.num_tokens)
                block_ids = torch.tensor(chunk.request.sequence.group_block_ids(group))
                seen[block_ids[positions // block_size], positions % block_size] = True
        return seen
