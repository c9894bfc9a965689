"""From options to tiers: the tiers that the manager knows, and the carriers of their transfers."""

import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from kvblocks.engine.collector import collector_paused
from kvblocks.engine.run.backends import Backend
from kvblocks.engine.run.determinism import ARITHMETIC
from kvblocks.engine.run.memory import free_memory, read_memory
from kvblocks.engine.run.runner import LoadedModel, ModelRunner
from kvblocks.engine.tiers.block_bytes import BlockBytes
from kvblocks.engine.tiers.carrier import Carrier, Place
from kvblocks.engine.tiers.fingerprint import fingerprint
from kvblocks.engine.tiers.offload import Offload, SharedTier
from kvblocks.engine.tiers.options import TierOptions
from kvblocks.engine.tiers.places import DiskPlace, HostPlace
from kvblocks.engine.tiers.seeker import Seeker
from kvblocks.engine.tiers.store_place import StorePlace
from kvblocks.errors import InvalidArgumentError
from kvblocks.groups.layout import check_groups
from kvblocks.groups.plan import Plan
from kvblocks.manager import KVCacheManager
from kvblocks.tiers.disk import DiskStore
from kvblocks.tiers.sealing import Sealer
from kvblocks.tiers.store import SharedStore, parse_address
from kvblocks.tiers.store.client import open_clients
from kvblocks.tiers.tier import Tier, check_layers

HOST, DISK, STORE = "host", "disk", "store"

DISK_MIN_STORE_TOKENS = 256
"""Prefixes of at least so many tokens are stored on the disk, or in a store, at once; shorter ones on their second use.
"""

KNOWN_SHARE, LEAST_KNOWN = 4, 4096
"""How many blocks of a shared store are known at a time: KNOWN_SHARE times the pool's, at least LEAST_KNOWN."""


@dataclass(frozen=True, slots=True)
class BuiltTiers:
    """The tiers of an engine whose manager isn't made yet. disk, store: opened, or None.

    used_bytes: by a block's column (`BlockIdentity`), how many of its first bytes its group's layers use.

    It is a context manager: an error inside closes the disk and the store.
    """

    tiers: tuple[Tier, ...] = ()
    disk: DiskStore | None = None
    store: SharedStore | None = None
    used_bytes: tuple[int, ...] = ()

    def __enter__(self) -> None:
        """Does nothing: see the class."""

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            if self.store is not None:
                self.store.close()
            if self.disk is not None:
                self.disk.close()

    def begin(self, manager: KVCacheManager, runner: ModelRunner) -> Offload | None:
        """Read what the disk holds, and return the `Offload`; None without tiers. O(slots on the disk)."""
        if not self.tiers:
            return None
        block_bytes, ended = BlockBytes(runner.kv_cache), threading.Event()
        carriers: list[Carrier] = []
        shared: SharedTier | None = None
        for tier in self.tiers:
            place: Place
            if self.disk is not None and tier.name == DISK:
                place = DiskPlace(block_bytes, self.disk, tier.max_transfer_blocks, self.used_bytes)
                with collector_paused():
                    manager.tiers.restore(DISK, self.disk.remembered())
            elif self.store is not None and tier.name == STORE:
                place = StorePlace(block_bytes, self.store, tier.max_transfer_blocks, self.used_bytes)
                loads, stores = (Carrier(STORE, place, block_bytes, ended.set) for _ in range(2))
                seeker = Seeker(
                    stores,
                    self.store,
                    manager.tiers,
                    block_size=manager.block_size,
                    num_columns=len(self.used_bytes) - 1,
                    on_end=ended.set,
                )
                shared = SharedTier(self.store, loads, seeker)
                carriers.append(stores)
                continue
            else:
                place = HostPlace(block_bytes, tier.num_blocks)
            carriers.append(Carrier(tier.name, place, block_bytes, ended.set))
        return Offload(manager.tiers, carriers, ended, shared)


def build_tiers(options: TierOptions, model: LoadedModel, plan: Plan, backend: Backend) -> BuiltTiers:
    """Open the tiers of the options, the fastest first. Raises InvalidArgumentError and DiskError.

    O(bytes of the weights) for a disk, or a store, whose fingerprint covers them.
    """
    tiers: list[Tier] = []
    disk = None
    if options.host_cache is not None:
        num_bytes = _host_bytes(options.host_cache, plan, model.device)
        tiers.append(Tier(HOST, num_bytes // plan.block_bytes, plan.block_bytes))
    if options.disk_cache is not None:
        check_layers(plan.groups)  # checked before the folder is opened, which may be another model's
        disk = DiskStore(
            Path(options.disk_cache).expanduser(),
            fingerprint=_fingerprint(model, plan, backend),
            num_block_bytes=plan.block_bytes,
            block_size=check_groups(plan.groups).block_size,
            max_bytes=read_memory(options.disk_bytes, torch.device("cpu"), "disk_cache_size"),
            secret=options.disk_cache_secret,
        )
        tiers.append(
            Tier(
                DISK,
                disk.num_slots,
                plan.block_bytes,
                store="reused",
                min_store_tokens=DISK_MIN_STORE_TOKENS,
                is_persistent=True,
            )
        )
    store = None
    if options.store is not None:
        try:
            store = _open_store(options.store, options.store_secret, model, plan, backend)
        except BaseException:
            if disk is not None:
                disk.close()
            raise
        num_known = max(LEAST_KNOWN, KNOWN_SHARE * plan.num_blocks)
        tiers.append(
            Tier(
                STORE,
                num_known,
                plan.block_bytes,
                store="reused",
                min_store_tokens=DISK_MIN_STORE_TOKENS,
                is_shared=True,
            )
        )
    return BuiltTiers(tuple(tiers), disk, store, _used_bytes(plan))


def _fingerprint(model: LoadedModel, plan: Plan, backend: Backend) -> bytes:
    """The fingerprint that names an engine's KV on a disk and in a store. O(bytes of the weights)."""
    block_size = check_groups(plan.groups).block_size
    kept = model.dtype if backend.scales is None else backend.scales
    layout = f"{kept}, blocks of {block_size}, {plan.groups}, layers {plan.layer_groups}"
    return fingerprint(model, layout, _bits_mode(model, backend))


def _open_store(url: str, secret: bytes | None, model: LoadedModel, plan: Plan, backend: Backend) -> SharedStore:
    """Return a client of the store. It connects later. Raises InvalidArgumentError."""
    check_layers(plan.groups)
    address = parse_address(url)
    return SharedStore(address, Sealer(_fingerprint(model, plan, backend), secret), open_clients(address))


def _used_bytes(plan: Plan) -> tuple[int, ...]:
    layout = check_groups(plan.groups)
    used = [len(layers) * size for layers, size in zip(plan.group_layers, plan.layer_bytes, strict=True)]
    columns = [used[side_group.group] for side_group in layout.side_groups for _ in range(side_group.num_columns)]
    return (plan.block_bytes if layout.primary is None else used[layout.primary], *columns)


def _host_bytes(host_cache: float | str, plan: Plan, device: torch.device) -> int:
    """The bytes of the arena. A share is one of the memory that the pool leaves free. Raises InvalidArgumentError."""
    cpu = torch.device("cpu")
    free = free_memory(cpu) - (plan.num_bytes if device.type == "cpu" else 0)
    num_bytes = read_memory(host_cache, cpu, "host_cache")
    if isinstance(host_cache, float):
        num_bytes = int(host_cache * free)
    if not plan.block_bytes <= num_bytes <= free:
        raise InvalidArgumentError(
            f"host_cache: expected at least {plan.block_bytes} bytes, a block, and at most {free}, which are free, got"
            f" {num_bytes}"
        )
    return num_bytes


def _bits_mode(model: LoadedModel, backend: Backend) -> str:
    """What the bits of KV depend on beside the weights, for an engine that promises the same bits."""
    if not backend.deterministic:
        return "natural"
    cpu = torch.backends.cpu.get_cpu_capability()
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else cpu
    packed = " with packed weights" if model.weights.lm_head.is_mkldnn else ""
    how = f"deterministic {backend.attention} on {device}{packed}"
    return f"{how}, arithmetic {ARITHMETIC}, torch {torch.__version__}, {torch.get_num_threads()} threads"
