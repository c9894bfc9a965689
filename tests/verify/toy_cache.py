"""A block manager as small as can be, for tests of the walk, with faults that can be switched on."""

from kvblocks.verify import CacheAdapter

FAULTS = {
    "no parent": "wrong KV",  # a block is found by its own tokens, whatever stands before it
    "no salt": "wrong KV",
    "freed early": "wrong KV",  # a block is free while a second request still has it
    "dead step is cached": "unwritten KV",
    "reset forgets nothing": "wrong KV",
    "last block shared": "wrong KV",  # an unfilled block is found too, and written by two
    "leaks": "lost blocks",
    "loses on refusal": "lost blocks",  # a start without room keeps the blocks of its hit
    "no hits": "missed hit",
    "one hit in three": "missed hit",
    "too few slots": "missing slots",
    "hit too long": "bad answer",
    "raises": "raised",
    "copies late": "unwritten KV",  # a block that two requests append to is copied, and nobody is told
}


class ToyCache(CacheAdapter):
    """Blocks are cached when the step has run, by their whole prefix, and evicted in the order of their release."""

    block_size = 4

    def __init__(self, num_blocks, fault=None):
        self.fault = fault
        self.num_slots = num_blocks * self.block_size
        self.queue = list(range(num_blocks))  # free blocks, the next one first
        self.owners = dict.fromkeys(self.queue, 0)
        self.cached = {}  # by prefix
        self.key_of = {}
        self.in_step = []
        self.num_starts = 0

    def key(self, request, end):
        start = end - self.block_size if self.fault == "no parent" else 0
        return (None if self.fault == "no salt" else request.salt, start and "?", tuple(request.token_ids[start:end]))

    def look_up(self, request):
        self.num_starts += 1
        if self.fault == "no hits" or (self.fault == "one hit in three" and self.num_starts % 3):
            return []
        found = []
        for end in range(self.block_size, len(request.token_ids), self.block_size):
            block = self.cached.get(self.key(request, end))
            if block is None:
                break
            found.append(block)
        if self.fault == "last block shared":
            end = len(found) * self.block_size
            found += [block for key, block in self.cached.items() if key[2] == tuple(request.token_ids)][:1]
            found = found if len(found) * self.block_size <= len(request.token_ids) else found[: end // self.block_size]
        return found

    def take(self, table, num_tokens):
        for _ in range(self.num_missing(table, num_tokens)):
            block = self.queue.pop(0)
            self.cached.pop(self.key_of.pop(block, None), None)
            self.owners[block] = 1
            table.append(block)

    def num_missing(self, table, num_tokens):
        return max(0, -(-num_tokens // self.block_size) - len(table))

    def start(self, request, num_new_tokens):
        hit = self.look_up(request)
        found = len(hit) * self.block_size
        end = min(found + num_new_tokens, len(request.token_ids))
        num_free = len(self.queue) - sum(block in self.queue for block in hit)
        if self.num_missing(hit, end) > num_free:
            if self.fault == "loses on refusal":
                self.queue = [block for block in self.queue if block not in hit]
            return None
        for block in hit:
            self.owners[block] += 1
            if block in self.queue:
                self.queue.remove(block)
        request.state = list(hit)
        self.take(request.state, end)
        self.in_step.append(request)
        if self.fault == "dead step is cached":
            self.cache(request, end)
        if self.fault == "raises" and self.num_starts == 5:
            raise KeyError("block 7")
        return len(request.token_ids) + 1 if self.fault == "hit too long" and found else found

    def grow(self, request, num_tokens):
        if self.num_missing(request.state, num_tokens) > len(self.queue):
            return False
        self.take(request.state, num_tokens)
        self.in_step.append(request)
        if self.fault == "copies late" and self.num_starts % 5 == 0 and self.queue:
            self.queue.append(request.state[-1])
            request.state[-1] = self.queue.pop(0)
        return True

    def slots(self, request):
        size = self.block_size
        found = [block * size + offset for block in request.state for offset in range(size)]
        return found[:-size] if self.fault == "too few slots" and len(found) > 3 * size else found

    def cache(self, request, num_tokens):
        for end in range(self.block_size, num_tokens + 1, self.block_size):
            block, key = request.state[end // self.block_size - 1], self.key(request, end)
            if key not in self.cached and block not in self.key_of:
                self.cached[key] = block
                self.key_of[block] = key

    def end_step(self):
        for request in self.in_step:
            self.cache(request, request.num_tokens)
        self.in_step.clear()

    def release(self, request):
        for block in reversed(request.state):
            self.owners[block] -= 1
            if self.fault == "freed early":
                self.owners[block] = 0
            if not self.owners[block] and block not in self.queue:
                self.queue.append(block)
        if self.fault == "leaks" and len(request.state) > 3:
            self.queue.remove(request.state[-1])

    def free(self, request):
        self.release(request)

    def fail_step(self, requests):
        for request in requests:
            self.release(request)
        self.in_step.clear()
        return True

    def reset(self):
        if self.fault != "reset forgets nothing":
            self.cached.clear()
            self.key_of.clear()
        return True

    def num_free_slots(self):
        return len(self.queue) * self.block_size
