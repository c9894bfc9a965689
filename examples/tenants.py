"""Tenants share a pool, and one that floods it can't evict what the others keep. Run it: it needs no torch.

A tenant is a salt. No tenant ever hits blocks that another one computed. A quota bounds what a tenant keeps cached
while others want the space. Every tenant may use empty blocks.
"""

from kvblocks import KVCacheManager, Sequence


def serve(manager: KVCacheManager, tenant: str, prompt: list[int]) -> int:
    """Compute a prompt, as an engine would, and return how many of its tokens were cached."""
    sequence = Sequence(f"request of {tenant}", prompt, salt=tenant)
    hit = manager.get_computed_blocks(sequence)
    if manager.allocate_slots(sequence, hit=hit) is None:
        raise RuntimeError("the pool is full of running requests: wait, or preempt one")
    manager.free(sequence)  # after the step that computed it; its blocks stay cached
    return hit.num_tokens


def share_of_anns_prompt(quota: int | None) -> float:
    """Let one tenant flood the pool, and return how much of another one's prompt is cached afterwards."""
    manager = KVCacheManager(num_blocks=64, block_size=16)
    if quota is not None:
        manager.quotas.set_default(quota)  # for every tenant; `set` is for one
    anns_prompt = list(range(256))
    serve(manager, "ann", anns_prompt)
    for number in range(10):
        serve(manager, "flood", [10_000 * (number + 1) + i for i in range(256)])
    manager.check()
    return serve(manager, "ann", anns_prompt) / len(anns_prompt)


manager = KVCacheManager(num_blocks=64, block_size=16)
serve(manager, "ann", list(range(256)))
print("Bob sends Ann's prompt:", serve(manager, "bob", list(range(256))), "tokens cached, since it is not his")
print("Ann sends it again:", serve(manager, "ann", list(range(256))), "tokens cached")
print("Blocks that were Ann's and are forgotten:", manager.forget_salt("ann"))

without, with_quota = share_of_anns_prompt(None), share_of_anns_prompt(32)
print(f"After another tenant's flood Ann finds {without:.0%} of her prompt; with quotas of 32 blocks, {with_quota:.0%}")
assert (without, with_quota) == (0.0, 255 / 256)
