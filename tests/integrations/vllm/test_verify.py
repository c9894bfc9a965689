"""vLLM's own manager and ours in its place, walked by `kvblocks.verify`, and a fault in how they are called."""

import pytest

from kvblocks import verify
from kvblocks.integrations.vllm.cache_manager import KVBlocksCacheManager
from kvblocks.verify.adapters.vllm_v1 import VllmAdapter


class OurAdapter(VllmAdapter):
    manager_class = KVBlocksCacheManager


@pytest.mark.parametrize("adapter", [VllmAdapter, OurAdapter])
def test_the_manager_has_no_fault(adapter):
    report = verify.run(adapter, 4000)
    assert {"hits", "starts refused", "grows refused", "resets"} <= report.met.keys()


def test_a_request_without_its_salt_is_found():
    class Unsalted(VllmAdapter):
        def start(self, request, num_new_tokens):
            salt, request.salt = request.salt, None
            found = super().start(request, num_new_tokens)
            request.salt = salt
            return found

    with pytest.raises(verify.VerificationError, match=r"wrong KV: .* with salt"):
        verify.run(Unsalted, 20_000)
