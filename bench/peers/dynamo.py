"""NVIDIA Dynamo's Rust core: its router's hashing and radix tree. It has no pool of blocks, so nothing to allocate."""

import json
from importlib.metadata import version

import dynamo._core as core

from bench.core.driver import Cases, Driver
from bench.core.workload import BLOCK_SIZE, FreshPrompts, calls_for, half_prompt, prompt
from bench.timing import Case


class Dynamo(Driver):
    """The router's index, which knows which worker has which prefix."""

    label = "dynamo"
    version = version("ai-dynamo-runtime")
    note = (
        "A block's hash covers its own tokens only, unchained. The router's tree says who has a prefix, not which "
        "blocks hold it. It takes lists, so a hit from a buffer is the same as one from a list."
    )

    def __init__(self) -> None:
        self._tree = core.RadixTree()
        self._fresh = FreshPrompts()

    def chain_hash(self, num_tokens: int) -> Cases:
        """`compute_block_hash_for_seq`."""
        tokens = self._fresh.make(num_tokens)
        run = core.compute_block_hash_for_seq
        return {"unchained, xxh3": Case(lambda _: run(tokens, BLOCK_SIZE), num_tokens / BLOCK_SIZE)}

    def _hit(self, num_tokens: int, token_ids: list[int], num_hit_tokens: int) -> Cases:
        self._store(num_tokens)
        tree, hash_blocks = self._tree, core.compute_block_hash_for_seq
        found = tree.find_matches(hash_blocks(token_ids, BLOCK_SIZE)).scores
        assert max(found.values()) == num_hit_tokens // BLOCK_SIZE
        num_calls = max(1, calls_for(num_tokens) // 4)

        def run(_: None) -> None:
            for _call in range(num_calls):
                tree.find_matches(hash_blocks(token_ids, BLOCK_SIZE))

        return {"hash and lookup": Case(run, num_calls)}

    def _store(self, num_tokens: int) -> None:
        """Tell the router's tree that a worker has stored `prompt(num_tokens)`."""
        hashes = core.compute_block_hash_for_seq(prompt(num_tokens), BLOCK_SIZE)
        blocks = [
            {"block_hash": num_tokens * 1_000_000 + i, "tokens_hash": tokens_hash, "mm_extra_info": None}
            for i, tokens_hash in enumerate(hashes)
        ]
        stored = {"event_id": 1, "dp_rank": 0, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
        self._tree.apply_event(0, json.dumps(stored).encode())

    def hit_buffer(self, num_tokens: int) -> Cases:
        """Hash, then `find_matches`."""
        return self._hit(num_tokens, prompt(num_tokens), num_tokens)

    def hit_list(self, num_tokens: int) -> Cases:
        """Hash, then `find_matches`."""
        return self._hit(num_tokens, prompt(num_tokens), num_tokens)

    def half_hit(self, num_tokens: int) -> Cases:
        """Hash, then `find_matches`."""
        return self._hit(num_tokens, half_prompt(num_tokens), num_tokens // 2)
