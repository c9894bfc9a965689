"""nano-vllm's own block manager, changed in the three things that kvblocks decides otherwise."""


def mend(block_manager, *, first=True, empties=True, copies=True):
    """A subclass of nano-vllm's BlockManager. The stand-in's manager needs no change.

    first: of equal blocks the first one is found, and when it goes, the next. nano-vllm's own finds the last one, and
    when that goes, none. empties: blocks that hold nothing are taken first. nano-vllm's own takes blocks in the order
    in which they were freed. copies: of equal blocks no other one than the first stays cached when nobody owns it, and
    the first is as new as it was. nano-vllm's own keeps all.
    """

    class Mended(block_manager):
        def __init__(self, *given):
            super().__init__(*given)
            self.equal = {}  # hash -> blocks

        def _allocate_block(self):
            number = self.blocks[self.free_block_ids[0]].hash
            block_id = super()._allocate_block()
            if first and number != -1:
                equal = self.equal[number]
                equal.remove(block_id)
                if equal:
                    self.hash_to_block_id[number] = equal[0]
            return block_id

        def hash_blocks(self, seq):
            super().hash_blocks(seq)
            if first:
                start, end = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens
                for block_id in seq.block_table[start // self.block_size : end // self.block_size]:
                    number = self.blocks[block_id].hash
                    self.equal.setdefault(number, []).append(block_id)
                    self.hash_to_block_id[number] = self.equal[number][0]

        def deallocate(self, seq):
            table = [*seq.block_table]
            super().deallocate(seq)
            if empties:
                for block_id in table:
                    if self.blocks[block_id].hash == -1 and not self.blocks[block_id].ref_count:
                        self.free_block_ids.remove(block_id)
                        self.free_block_ids.appendleft(block_id)
            if first and copies:
                self._drop_copies(table)

        def _drop_copies(self, table):
            dropped = []
            for block_id in table:
                block = self.blocks[block_id]
                equal = self.equal.get(block.hash, [block_id])
                if block.ref_count or equal[0] == block_id or block_id not in equal:
                    continue
                if not self.blocks[equal[0]].ref_count:
                    self.free_block_ids.remove(equal[0])
                    self.free_block_ids.insert(self.free_block_ids.index(block_id), equal[0])
                equal.remove(block_id)
                block.reset()
                block.ref_count = 0
                dropped.append(block_id)
            for block_id in sorted(dropped, reverse=True):
                self.free_block_ids.remove(block_id)
                self.free_block_ids.appendleft(block_id)

    return Mended
