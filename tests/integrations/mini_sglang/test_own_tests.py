"""mini-sglang's own tests of caches, with kvblocks in the place of its radix tree."""

import importlib.util
from pathlib import Path

import pytest

from integrations.mini_sglang import sources


@pytest.mark.skipif(not sources.SOURCES, reason=sources.REASON)
def test_its_tests_of_caches_pass(minisgl, monkeypatch):
    if not minisgl.is_real:
        return
    path = Path(sources.SOURCES, "tests", "core", "test_cache_allocate.py")
    spec = importlib.util.spec_from_file_location("minisgl.its_test_cache_allocate", path)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    monkeypatch.setitem(vars(minisgl.kvcache.SUPPORTED_CACHE_MANAGER)["_registry"], "radix", ours := Counted(minisgl))
    tests = theirs.TestAllocateEvictPageAlignment()
    names = [name for name in dir(tests) if name.startswith("test_")]
    assert len(names) >= 6
    for name in names:
        vars(theirs.core)["_GLOBAL_CTX"] = None  # as their fixture does
        getattr(tests, name)()
    assert ours.num_made == len(names)


class Counted:
    """Makes caches of ours, and counts them."""

    def __init__(self, minisgl):
        self.kind, self.num_made = minisgl.adapter.KVBlocksPrefixCache, 0

    def __call__(self, device):
        self.num_made += 1
        return self.kind(device)
