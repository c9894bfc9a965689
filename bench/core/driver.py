"""The interface of a contestant: the same items of work, each by the contestant's own public calls."""

from bench.timing import Case

Cases = dict[str, Case]
"""The ways in which a contestant does an item, by name. The first one is compared. Empty if it can't do the item."""


class Driver:
    """One contestant. The constructor imports it, and raises if that fails.

    Methods for items that it can't do are kept. label, version: who it is. note: sentences about what its numbers
    contain or leave out.
    """

    label = "?"
    version = "?"
    note = ""

    def allocate(self, num_blocks: int) -> Cases:  # noqa: ARG002  # the contract; so are all below
        """Take empty blocks from the pool, `num_blocks` per call. Per block."""
        return {}

    def free(self, num_blocks: int) -> Cases:  # noqa: ARG002
        """Give blocks back, `num_blocks` per call. Per block."""
        return {}

    def evict(self, num_blocks: int) -> Cases:  # noqa: ARG002
        """Take blocks from a pool whose blocks are all cached, `num_blocks` per call. Per block."""
        return {}

    def touch(self, num_blocks: int) -> Cases:  # noqa: ARG002
        """Take `num_blocks` cached blocks out of the middle of the free queue. Per block."""
        return {}

    def chain_hash(self, num_tokens: int) -> Cases:  # noqa: ARG002
        """Compute the digests of a prompt's blocks. Per block."""
        return {}

    def hit_buffer(self, num_tokens: int) -> Cases:  # noqa: ARG002
        """Look up a completely cached prompt, whose tokens are in the contestant's own packed form. Per call."""
        return {}

    def hit_list(self, num_tokens: int) -> Cases:  # noqa: ARG002
        """Look up a completely cached prompt, whose tokens are in a list. Per call."""
        return {}

    def half_hit(self, num_tokens: int) -> Cases:  # noqa: ARG002
        """Look up a prompt whose first half is a cached prompt's first half. Per call."""
        return {}

    def append(self, num_sequences: int) -> Cases:  # noqa: ARG002
        """Make room for decoded tokens, one call per token. Per token."""
        return {}

    def step(self, num_sequences: int) -> Cases:  # noqa: ARG002
        """Make room for a token of each running sequence, in as few calls as the contestant needs. Per token."""
        return {}

    def lifecycle(self, num_sequences: int) -> Cases:  # noqa: ARG002
        """Look up, allocate, decode and free requests, `num_sequences` at a time in lock step. Per request."""
        return {}

    def hold_empty_pool(self) -> object | None:
        """Return a new pool, to measure its memory; None if the contestant has no pool of blocks."""
        return None

    def fill(self, pool: object) -> None:
        """Cache a prefix in every block of `pool`, which `hold_empty_pool` made."""
