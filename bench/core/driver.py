"""What a contestant is: the same items of work, each over the contestant's own public calls."""

from bench.timing import Case

Cases = dict[str, Case]
"""The ways in which a contestant does one item, by name. The first is the one compared. Empty if it can't do it."""


class Driver:
    """One contestant. Making it imports it, and raises if that fails. An item it can't do keeps the method below.

    label, version: who it is. note: what its numbers contain or leave out, one sentence each.
    """

    label = "?"
    version = "?"
    note = ""

    def allocate(self, num_blocks: int) -> Cases:  # noqa: ARG002  # the contract; so are all below
        """Take blocks that hold nothing from the pool, `num_blocks` a call. Per block."""
        return {}

    def free(self, num_blocks: int) -> Cases:  # noqa: ARG002
        """Give blocks back, `num_blocks` a call. Per block."""
        return {}

    def evict(self, num_blocks: int) -> Cases:  # noqa: ARG002
        """Take blocks from a pool all of whose blocks are cached, `num_blocks` a call. Per block."""
        return {}

    def touch(self, num_blocks: int) -> Cases:  # noqa: ARG002
        """Take `num_blocks` cached blocks out of the middle of the free queue. Per block."""
        return {}

    def chain_hash(self, num_tokens: int) -> Cases:  # noqa: ARG002
        """Compute the digests of a prompt's blocks. Per block."""
        return {}

    def hit_buffer(self, num_tokens: int) -> Cases:  # noqa: ARG002
        """Look up a prompt that is wholly cached, its tokens given in the contestant's own packed form. Per call."""
        return {}

    def hit_list(self, num_tokens: int) -> Cases:  # noqa: ARG002
        """Look up a prompt that is wholly cached, its tokens given as a list. Per call."""
        return {}

    def half_hit(self, num_tokens: int) -> Cases:  # noqa: ARG002
        """Look up a prompt whose first half is a cached prompt's first half. Per call."""
        return {}

    def append(self, num_sequences: int) -> Cases:  # noqa: ARG002
        """Make room for decoded tokens, one call a token. Per token."""
        return {}

    def step(self, num_sequences: int) -> Cases:  # noqa: ARG002
        """Make room for a token of each running sequence, in as few calls as the contestant needs. Per token."""
        return {}

    def lifecycle(self, num_sequences: int) -> Cases:  # noqa: ARG002
        """Look requests up, allocate, decode and free them, so many at a time in lock step. Per request."""
        return {}

    def hold_empty_pool(self) -> object | None:
        """Return a new pool, for its memory to be measured; None: the contestant has no pool of blocks."""
        return None

    def fill(self, pool: object) -> None:
        """Cache a prefix in every block of `pool`, which `hold_empty_pool` made."""
