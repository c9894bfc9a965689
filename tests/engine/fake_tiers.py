"""Tiers for the scheduler's tests: slots with the content of a `FakeCache`'s blocks, moved when the test says so."""

from engine.fake_cache import BLOCK_SIZE

GARBAGE = "half a transfer"


class FakeTiers:
    """Moves bytes between a scheduler's device and its tiers. A transfer is under way until the test ends it."""

    def __init__(self, scheduler, cache):
        self.scheduler = scheduler
        self.tiers = scheduler.manager.tiers
        self.cache = cache
        self.slots = {}
        self.under_way = []
        self.answered = []

    def begin(self):
        """Take new transfers. The blocks that a load writes to hold garbage from now on."""
        for transfer in self.tiers.take_transfers():
            self.under_way.append(transfer)
            for block_id, slot in zip(transfer.block_ids, transfer.slots, strict=True):
                for offset in range(BLOCK_SIZE):
                    if transfer.is_load:
                        self.cache.slots[block_id * BLOCK_SIZE + offset] = GARBAGE
                    else:
                        self.slots[transfer.tier, slot, offset] = GARBAGE

    def end(self, transfer, *, ok=True):
        """Move a transfer's bytes, or leave garbage, and answer it. Returns the results of loads."""
        self.under_way.remove(transfer)
        self.answered.append(transfer)
        for block_id, slot in zip(transfer.block_ids, transfer.slots, strict=True):
            for offset in range(BLOCK_SIZE):
                place = transfer.tier, slot, offset
                if ok and transfer.is_load:
                    self.cache.slots[block_id * BLOCK_SIZE + offset] = self.slots[place]
                elif ok:
                    self.slots[place] = self.cache.slots[block_id * BLOCK_SIZE + offset]
        loaded = self.tiers.complete(transfer, ok, seconds=0.001)
        for each in loaded:
            self.scheduler.note_loaded(each)
        self.scheduler.manager.check()
        return loaded

    def settle(self):
        """Carry out all transfers."""
        while self.tiers.is_busy:
            self.begin()
            while self.under_way:
                self.end(self.under_way[0])
