"""What a tenant remembers of its free blocks stays small, and right."""

import sys
from array import array
from collections.abc import Iterable
from random import Random

from kvblocks.core.block import ROOT, KVCacheBlock
from kvblocks.core.pool import BlockPool
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.hashing.by_name import get_hash_scheme
from kvblocks.hashing.extra_keys import encode_extra_keys
from kvblocks.retention.quotas import TenantQuotas
from kvblocks.retention.tenant import Tenant

NUM_BLOCKS = 200


def make_pool(quota: int) -> tuple[BlockPool, TenantQuotas]:
    pool = BlockPool(NUM_BLOCKS, PrefixIndex(1, get_hash_scheme("xxh3_128")))
    quotas = TenantQuotas()
    quotas.set_default(quota)
    pool.index.accounts = quotas
    pool.index.watch(quotas)
    return pool, quotas


def fill(pool: BlockPool, quotas: TenantQuotas, salt: str, first: int, num_blocks: int) -> Tenant:
    """Cache so many blocks of a tenant's, and give them back."""
    keys = encode_extra_keys(salt, None, (), 1)
    blocks = pool.take(num_blocks)
    pool.index.cache(ROOT, blocks, memoryview(array("I", range(first, first + num_blocks))).cast("B"), keys, 0)
    pool.release_table(blocks)
    tenant = quotas.account_of(keys[0])
    assert tenant is not None
    return tenant


def test_tenants_that_come_and_go_keep_no_blocks() -> None:
    """Otherwise each tenant would refer to the whole pool in time: with 100,000 blocks and 1000 salts, 10 GB."""
    pool, quotas = make_pool(NUM_BLOCKS)
    tenants = [fill(pool, quotas, f"tenant-{number}", 0, NUM_BLOCKS) for number in range(50)]
    assert tenants[-1].num_cached_blocks == NUM_BLOCKS
    assert sum(len(tenant.free_blocks) for tenant in tenants) <= 2 * NUM_BLOCKS + 16 * len(tenants)
    assert pool.take(NUM_BLOCKS)
    assert len(tenants[-1].free_blocks) <= 16


def test_those_over_their_quota_are_just_those() -> None:
    """With any number of salts, data is kept only for tenants over their quota."""
    pool, quotas = make_pool(0)
    tenants = [fill(pool, quotas, f"user-{number}", 0, 5) for number in range(300)]
    assert set(quotas.over) == {tenant for tenant in tenants if tenant.num_excess_blocks > 0}
    assert len(quotas.over) <= NUM_BLOCKS
    quotas.set_default(NUM_BLOCKS)
    quotas.recount(pool.index.count_by_run(), [*pool.queue])
    assert not quotas.over


def test_what_is_dropped_was_not_free() -> None:
    """After evictions, hits and releases, the remaining blocks are in the order of the free queue."""
    pool, quotas = make_pool(NUM_BLOCKS)
    for turn in range(30):
        tenant = fill(pool, quotas, "ann", turn * 1000, 90)
        fill(pool, quotas, "bob", turn * 1000, 50 + turn)
        mine = cached_of(tenant, [pool.blocks[block_id] for block_id in pool.free_block_ids()])
        held = mine[::3]
        pool.touch(held)
        left = [block for block in mine if block not in held]
        assert tenant.first_free() is left[0]
        assert cached_of(tenant, [block for block in tenant.free_blocks if block.ref_cnt == 0]) == left
        pool.release_table(held)
        assert cached_of(tenant, tenant.free_blocks) == left + held[::-1]
        assert len(tenant.free_blocks) <= 2 * tenant.num_cached_blocks + 16
    pool.check([])


def test_the_victim_is_of_the_tenant_that_is_over_its_quota_longest() -> None:
    """The same victim as a look at all tenants finds, with no more entries than tenants."""
    pool, quotas = make_pool(5)
    random = Random(1)
    held: list[KVCacheBlock] = []
    victims = set()
    for turn in range(600):
        salt = f"user-{random.randrange(12)}"
        fill(pool, quotas, salt, 1000 * turn, random.randrange(1, 12))
        if random.random() < 0.2:
            pool.release_table(held)
            held = []
        else:
            theirs = [block for tenant in quotas.tenants() for block in tenant.free_blocks if block.ref_cnt == 0]
            more = random.sample(theirs, min(len(theirs), random.randrange(30), pool.num_free_blocks - 20))
            pool.touch(more)
            held += more
        expected = [block for tenant in quotas.over if (block := tenant.first_free()) is not None]
        victim = quotas.next_victim()
        assert [victim] == (expected[:1] or [None])
        assert victim is None or victim.ref_cnt == 0
        victims.add(victim)
    assert len(victims) > 100
    assert None in victims
    pool.check([held])


def test_a_tenant_that_comes_and_goes_is_kept_once() -> None:
    pool, quotas = make_pool(1)
    first = fill(pool, quotas, "first", 0, 5)
    second = fill(pool, quotas, "second", 1000, 2)
    blocks = list(second.free_blocks)
    for _ in range(1000):  # over, and not over any more, while another one is over all the time
        second.add(-1)
        second.add(1)
    assert quotas.next_victim() is first.first_free()
    assert sys.getrefcount(second) < 40
    first.add(-4)
    assert quotas.next_victim() is blocks[0]


def cached_of(tenant: Tenant, blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
    return [block for block in blocks if block.run is not None and block.run.account is tenant]
