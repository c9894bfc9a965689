"""Builds tiers from options: opens the places, tells the manager about the tiers, and makes the transfers' carriers."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from kvblocks import KVCacheManager, Plan, Tier
from kvblocks.engine.collector import collector_paused
from kvblocks.engine.run.backends import Backend
from kvblocks.engine.run.runner import LoadedModel, ModelRunner
from kvblocks.engine.tiers.block_bytes import BlockBytes
from kvblocks.engine.tiers.carrier import Carrier
from kvblocks.engine.tiers.offload import Offload
from kvblocks.engine.tiers.options import TierOptions
from kvblocks.engine.tiers.place import Place, Site
from kvblocks.engine.tiers.registry import place_of
from kvblocks.engine.tiers.seeker import Seeker
from kvblocks.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class BuiltTiers:
    """The opened places of an engine whose manager isn't made yet, the fastest first.

    As a context manager it closes them if an error is raised inside.
    """

    places: tuple[Place, ...]
    num_columns: int

    def __enter__(self) -> None:
        """Does nothing: see the class."""

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            for place in reversed(self.places):
                place.close()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers to make the manager with."""
        return tuple(place.tier for place in self.places)

    def begin(self, manager: KVCacheManager, runner: ModelRunner) -> Offload | None:
        """Read what the places remember, and return the `Offload`, or None without tiers. O(slots on the disk)."""
        if not self.places:
            return None
        block_bytes, ends = BlockBytes(runner.kv_cache), SimpleQueue[None]()
        on_end = partial(ends.put, None)
        carriers: list[Carrier] = []
        seeker: Seeker | None = None
        for place in self.places:
            if place.tier.is_persistent:
                with collector_paused():
                    manager.tiers.restore(place.tier.name, place.remembered())
            carriers.append(Carrier(place.tier.name, place, block_bytes, on_end))
            if place.shared is not None:
                seeker = Seeker(
                    carriers[-1],
                    place.shared,
                    manager.tiers,
                    block_size=manager.block_size,
                    num_columns=self.num_columns,
                    on_end=on_end,
                )
        return Offload(manager.tiers, carriers, ends, seeker)


def build_tiers(options: Sequence[TierOptions], model: LoadedModel, plan: Plan, backend: Backend) -> BuiltTiers:
    """Open the places of tiers, the fastest first. Raises InvalidArgumentError, and what the places raise.

    O(bytes of the weights) for each place whose fingerprint covers them.
    """
    places: list[Place] = []
    site = Site(model, plan, backend)
    with ExitStack() as failing:
        if options:
            Tier.check_groups(plan.groups)  # checked before a folder is opened, which may be another model's
        for one in options:
            place = place_of(one).open(one, site)
            if place is not None:
                places.append(place)
                failing.callback(place.close)
        if sum(place.shared is not None for place in places) > 1:
            raise InvalidArgumentError("tiers: expected at most one store that servers share, got several")
        failing.pop_all()
    return BuiltTiers(tuple(places), len(site.used_bytes) - 1)
