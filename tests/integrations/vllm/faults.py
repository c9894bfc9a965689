"""Faults put into a scheduler's manager, so that it can be shown that the comparisons notice them.

Each stands between a scheduler and its manager, and changes one of the scheduler's calls now and then.
"""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

BLOCK_SIZE = 16


class Between:
    """Passes every call on."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._num_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def is_due(self) -> bool:
        """Return whether this call is to go wrong: every twelfth."""
        self._num_calls += 1
        return self._num_calls % 12 == 0


class ForgetsToFree(Between):
    """Keeps the blocks of a request now and then."""

    def free(self, request: Any) -> None:
        """Do nothing when it is due."""
        if not self.is_due():
            self._manager.free(request)


class FindsLess(Between):
    """Finds one block less than is cached."""

    def get_computed_blocks(self, request: Any) -> Any:
        """Return a hit without its last block."""
        blocks, num_tokens, boundary = self._manager.get_computed_blocks(request)
        if not num_tokens:
            return blocks, num_tokens, boundary
        shorter = num_tokens - BLOCK_SIZE
        return self._manager.truncate_computed_blocks(blocks, shorter), shorter, boundary


class TakesTooMuch(Between):
    """Takes one block more than needed now and then."""

    def allocate_slots(self, request: Any, num_new_tokens: int, **options: Any) -> Any:
        """Ask for a block's tokens more when it is due."""
        if self.is_due():
            options["num_lookahead_tokens"] = options.get("num_lookahead_tokens", 0) + BLOCK_SIZE
        return self._manager.allocate_slots(request, num_new_tokens, **options)


class RefusesTooOften(Between):
    """Says now and then that there is no room."""

    def allocate_slots(self, request: Any, num_new_tokens: int, **options: Any) -> Any:
        """Refuse a request that is to be admitted when it is due."""
        if "has_scheduled_reqs" in options and self.is_due():
            return None
        return self._manager.allocate_slots(request, num_new_tokens, **options)


class IgnoresSalts(Between):
    """Shares blocks between salts."""

    def get_computed_blocks(self, request: Any) -> Any:
        """Drop the salt of a request before it is first looked up."""
        request.cache_salt = None
        request.block_hashes.clear()
        request.update_block_hashes()
        return self._manager.get_computed_blocks(request)


class GivesBackEarly(Between):
    """Frees the blocks of a request that still runs, now and then."""

    def allocate_slots(self, request: Any, num_new_tokens: int, **options: Any) -> Any:
        """Free them, and take as many anew, when it is due: others may have them by then."""
        given = self._manager.allocate_slots(request, num_new_tokens, **options)
        if given is not None and "has_scheduled_reqs" in options and self.is_due():
            shown = given if options.get("num_new_computed_tokens") else self._manager.get_blocks(request.request_id)
            ids = shown.get_block_ids()
            self._manager.free(request)
            return type("Gone", (), {"get_block_ids": lambda *_, **__: ids})()
        return given


FAULTS = [ForgetsToFree, FindsLess, TakesTooMuch, RefusesTooOften, IgnoresSalts, GivesBackEarly]


def with_fault(kind: type[Scheduler], fault: type[Between]) -> type[Scheduler]:
    """Return a scheduler as `kind`, whose manager has a fault."""

    class Faulty(kind):  # type: ignore[valid-type, misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.kv_cache_manager = fault(self.kv_cache_manager)

    return Faulty
