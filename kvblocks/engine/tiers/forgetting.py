"""`Forgetting`: the deletion of a salt's bytes in the tiers, which runs beside the engine's thread."""

from collections.abc import Iterable
from concurrent.futures import Future, wait

from kvblocks import Transfer
from kvblocks.engine.errors import ForgetError
from kvblocks.errors import KVBlocksError

FORGET_S = 60.0
"""How many seconds a deletion may take before its caller is told what is left."""


class Forgetting:
    """A deletion under way. Any thread may call it.

    salt: the salt whose blocks are deleted. num_blocks: how many of them can't be hit any more. parts: for each tier
    whose bytes outlive the process, a future that is done when they are gone there. waits_for: the transfers that were
    under way when it began, whose slots are overwritten when they end; only the engine's thread uses it.
    """

    def __init__(self, salt: str | None, num_blocks: int, tiers: Iterable[str], waits_for: Iterable[Transfer]) -> None:
        self.salt = salt
        self.num_blocks = num_blocks
        self.parts: dict[str, Future[None]] = {tier: Future() for tier in tiers}
        self.waits_for = set(waits_for)
        for part in self.parts.values():
            part.set_running_or_notify_cancel()  # nobody who waits for it can cancel it

    def follow(self, tier: str, deletion: "Future[None]") -> None:
        """End a tier's part when `deletion` ends, with the same result."""
        deletion.add_done_callback(lambda done: self.end(tier, done.exception()))

    def end(self, tier: str, error: BaseException | None) -> None:
        """End a tier's part, with an error or None."""
        if error is None:
            self.parts[tier].set_result(None)
        else:
            self.parts[tier].set_exception(error)

    def abandon(self) -> None:
        """End the parts that never began, because the engine was closed."""
        for tier, part in self.parts.items():
            if not part.done():
                self.end(tier, KVBlocksError("expected an engine that stays open, got one that was closed"))

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`. Return whether all parts have ended."""
        return not wait(self.parts.values(), seconds).not_done

    def check(self) -> None:
        """Raise ForgetError, which says what is left and what to do, unless all parts have ended without an error."""
        left: list[str] = []
        for tier, part in self.parts.items():
            if not part.done():
                left.append(f"{tier}: the deletion has not ended yet, and goes on")
                continue
            error = part.exception()
            if error is not None and not isinstance(error, KVBlocksError):
                raise error
            if error is not None:
                left.append(f"{tier}: {error}")
        if left:
            raise ForgetError(
                "forget_salt: expected all bytes to be deleted, got some that are left, though nothing finds them any"
                f" more: {'; '.join(left)}. Try again: it continues where it failed"
            )
