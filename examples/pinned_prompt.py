"""A pin keeps a system prompt cached, whatever else comes. Run it: it needs no torch.

A pin asks the manager to keep a prefix, which needn't be computed yet. It gives up its blocks only when a request needs
blocks and no others are left, and holds them again once the prefix is computed again. A pin of priority 100 never gives
up blocks.
"""

from kvblocks import KVCacheManager, Sequence

SYSTEM_PROMPT = list(range(128))  # 8 blocks
ROUNDS = 20


def serve(manager: KVCacheManager, name: str, prompt: list[int]) -> int:
    """Compute a prompt, as an engine would, and return how many of its tokens were cached."""
    sequence = Sequence(name, prompt)
    hit = manager.get_computed_blocks(sequence)
    if manager.allocate_slots(sequence, hit=hit) is None:
        raise RuntimeError(f"no room: {manager.last_refusal}")
    manager.free(sequence)
    return hit.num_tokens


def cached_at_each_question(manager: KVCacheManager) -> list[int]:
    """Send a question with the system prompt now and then. Between questions come long documents, each only once."""
    found = []
    for number in range(ROUNDS):
        serve(manager, f"document {number}", [1000 * (number + 1) + i for i in range(500)])
        if number % 5 == 0:
            found.append(serve(manager, f"question {number}", [*SYSTEM_PROMPT, 900 + number]))
    return found


plain = KVCacheManager(num_blocks=40, block_size=16)
print("without a pin, cached at each question:", cached_at_each_question(plain))

pinned = KVCacheManager(num_blocks=40, block_size=16)
pin = pinned.pins.pin(SYSTEM_PROMPT, priority=80)  # expires_at=…: on a clock of yours, see `pins.expire`
found = cached_at_each_question(pinned)
print("with one, from the second question on:", found)
print(f"{pin.num_held_blocks} of {pin.num_blocks} blocks held")
assert found == [0, 128, 128, 128]

pinned.pins.unpin(pin)  # its blocks stay cached, like any others
pinned.check()
