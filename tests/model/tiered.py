"""Managers of tiers whose transfers all go well, step by step."""

from kvblocks import KVCacheManager, Sequence, Tier

PROMPT = range(40)  # ten blocks of four tokens


def make_manager(num_blocks=32, *tiers, **options):
    return KVCacheManager(num_blocks, 4, tiers=tiers or [Tier("host", 64, 100)], debug=True, **options)


def run(manager, name="one", tokens=PROMPT, **more):
    """Compute a sequence, and free it."""
    sequence = Sequence(name, tokens, **more)
    assert manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence)) is not None
    manager.free(sequence)


def settle(manager):
    """Carry all transfers out, until there are none; returns them."""
    taken = []
    while found := manager.tiers.take_transfers():
        taken += found
        for transfer in found:
            manager.tiers.complete(transfer, ok=True)
    return taken


def spill(manager):
    """Have everything evicted from the device."""
    sequence = Sequence("spill", range(1000, 1000 + 4 * manager.num_blocks))
    assert manager.allocate_slots(sequence) is not None
    manager.abort(sequence, 0)


def start(manager, name="two", tokens=PROMPT, num_new_tokens=0):
    """Start a sequence with all that is found; returns it and the loads."""
    sequence = Sequence(name, tokens)
    hit = manager.get_computed_blocks(sequence)
    loads = manager.tiers.find(hit)
    assert manager.tiers.allocate(sequence, hit, loads, num_new_tokens) is not None
    return sequence, loads


def stats(manager, number=0):
    return list(manager.tiers)[number]
