"""A scheduler that uses a prefix cache as mini-sglang's does.

Pages that are found for a prompt are locked, and copied to its row of the page table. Before a step pages are taken, by
eviction if need be. A prompt is inserted when its result is seen, which is after the next step was launched, and again
when its request ends. After an insertion the pages among the first `cached_len` that weren't found before are freed.
"""

from collections import deque
from types import SimpleNamespace

import torch

from minisgl.kvcache import create_prefix_cache


class Scheduler:
    def __init__(self, engine, settings, cache_type):
        self.engine, self.settings, self.size = engine, settings, settings.page_size
        self.cache = create_prefix_cache(torch.device("cpu"), cache_type)
        self.free = deque(range(0, settings.num_pages * self.size, self.size))
        self.rows = [*range(settings.max_running)]
        self.token_pool = torch.zeros_like(engine.page_table)
        self.waiting, self.running, self.done = deque(), [], set()

    def is_idle(self):
        return not self.waiting and not self.running

    def check_integrity(self):
        self.cache.check_integrity()
        num_cached = self.cache.size_info.total_size // self.size
        assert len(self.free) + num_cached == self.settings.num_pages

    def add(self, uid, tokens, max_tokens):
        self.waiting.append(SimpleNamespace(uid=uid, tokens=tokens, max_tokens=max_tokens, req=None))

    def loop(self, last):
        reqs = self._prefills() or [*self.running]
        data = None
        if reqs:
            for req in reqs:
                self._give_pages(req)
            tokens = self.engine.run(reqs, self.token_pool)
            for req, token in zip(reqs, tokens, strict=True):
                req.cached_len, req.device_len = req.device_len, req.device_len + 1
                if req.is_whole and req.device_len <= req.most:
                    self.token_pool[req.table_idx, req.device_len - 1] = token
            self.running += [req for req in reqs if req.is_whole and req not in self.running]
            self.running = [req for req in self.running if req.device_len < req.most]
            data = reqs, tokens
        if last is not None:
            self._finish(*last)
        return data

    def _prefills(self):
        chosen, budget = [], self.settings.prefill_budget
        reserved = sum(req.most - req.device_len + self.size for req in self.running)
        while self.waiting and budget > 0:
            asked = self.waiting[0]
            req = asked.req or self._admit(asked, reserved)
            if req is None:
                break
            req.device_len = min(req.cached_len + budget, len(asked.tokens))
            budget -= req.device_len - req.cached_len
            reserved += len(asked.tokens) - req.cached_len + asked.max_tokens
            req.is_whole = req.device_len == len(asked.tokens)
            part = asked.tokens[: req.device_len]
            req.input_ids = part
            self.token_pool[req.table_idx, : len(part)] = part
            chosen.append(req)
            asked.req = req
            if req.is_whole:
                self.waiting.popleft()
        return chosen

    def _admit(self, asked, reserved):
        if not self.rows:
            return None
        handle = self.cache.match_prefix(asked.tokens[:-1]).cuda_handle
        needed = len(asked.tokens) - handle.cached_len + asked.max_tokens + reserved
        self.cache.lock_handle(handle)
        if needed > self.cache.size_info.evictable_size + len(self.free) * self.size:
            self.cache.lock_handle(handle, unlock=True)
            return None
        row, most = self.rows.pop(), len(asked.tokens) + asked.max_tokens
        if handle.cached_len:
            self.engine.page_table[row, : handle.cached_len] = handle.get_matched_indices()
        self.engine.found[asked.uid] = handle.cached_len
        return SimpleNamespace(
            uid=asked.uid, table_idx=row, cached_len=handle.cached_len, device_len=0, most=most, handle=handle
        )

    def _give_pages(self, req):
        first, end = (-(-length // self.size) for length in (req.cached_len, req.device_len))
        if end - first > len(self.free):
            slots = self.cache.evict((end - first - len(self.free)) * self.size)
            assert slots.dtype == torch.int32
            self.free.extend(slots[:: self.size].tolist())
        for page in range(first, end):
            start = self.free.popleft()
            row = self.engine.page_table[req.table_idx]
            row[page * self.size : (page + 1) * self.size] = torch.arange(start, start + self.size)

    def _finish(self, reqs, tokens):
        ended = set()
        for req, token in zip(reqs, tokens, strict=True):
            if not req.is_whole or req.uid in self.done:
                continue
            is_prompt = not self.engine.answers.get(req.uid)
            req.input_ids = torch.cat([req.input_ids, torch.tensor([token], dtype=torch.int32)])
            self.engine.answers.setdefault(req.uid, []).append(token)
            if token == self.engine.eos or len(req.input_ids) >= req.most:
                self.running = [other for other in self.running if other is not req]
                self.rows.append(req.table_idx)
                ended.add(req.uid)
                self._insert(req, goes_on=False)
            elif is_prompt:
                self._insert(req, goes_on=True)
        self.done |= ended

    def _insert(self, req, *, goes_on):
        slots = self.engine.page_table[req.table_idx, : req.cached_len]
        num_freed, handle = self.cache.insert_prefix(req.input_ids[: req.cached_len], slots)
        self.cache.lock_handle(req.handle, unlock=True)
        self.free.extend(slots[req.handle.cached_len : num_freed : self.size].tolist())
        if goes_on:
            req.handle = handle
            self.cache.lock_handle(handle)
        else:
            self.free.extend(slots[handle.cached_len :: self.size].tolist())
