"""The page size that a cache asks for."""

from types import SimpleNamespace

_context = SimpleNamespace(page_size=1)


def get_global_ctx():
    return _context
