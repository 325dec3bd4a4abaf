"""Ranks that train one model together: what each keeps of it, and the way full values and gradients go between them.

Every rank keeps its shard of every copy, gradient and optimizer state, but all of a compute copy that is resident. A
gather reads this rank's shard over its route, as all ranks do at once, and then gathers the full value over the links.
A gradient is reduced over the links before its shard leaves. ZeRO stage 3 and bandwidth-centric partitioning:
Rajbhandari et al., arXiv 1910.02054 (section 5) and 2104.07857 (section 6.1).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Hardware, Route, route_name
from zinf_compile.ir.slices import shard_size
from zinf_compile.ir.transfers import Moved, Transfer


class Leg(NamedTuple):
    """A part of the way of some bytes: over one route, or over the links between the devices."""

    route: Route
    nbytes: int

    @property
    def seconds(self) -> float:
        """Return how long it takes its lanes."""
        return self.route.latency_seconds + self.nbytes / self.route.bytes_per_second


# Not slotted: what is asked for again and again is worked out once.
@dataclass(frozen=True, kw_only=True)
class World:
    """So many ranks, one on each device of some hardware."""

    hardware: Hardware
    num_ranks: int

    @cached_property
    def routes(self) -> dict[tuple[Tier, Tier], Route]:
        """Return the hardware's routes by where they come from and where they lead."""
        named = {route.name: route for route in self.hardware.routes}
        pairs = ((source, destination) for source in Tier for destination in Tier)
        return {pair: named[name] for pair in pairs if (name := route_name(*pair)) in named}

    @cached_property
    def _gathers(self) -> dict[tuple[Tier, int], tuple[Leg, ...]]:
        return {}  # blocks repeat, so cache the legs per (tier, size)

    @cached_property
    def links(self) -> Route:
        """Return the links between the devices of all ranks, as a route of full bytes."""
        return self.hardware.links(self.num_ranks)

    def legs(self, transfer: Transfer, *, is_resident: bool = False) -> tuple[Leg, ...]:
        """Return the legs of a transfer, () if no bytes move. ``is_resident`` says where a gradient's parameter is."""
        if transfer.what is Moved.PARAMETERS:
            return self.gather_legs(transfer.source, transfer.nbytes)
        if transfer.what is Moved.GRADIENT:
            return self.gradient_legs(transfer.destination, transfer.nbytes, is_resident=is_resident)
        return (Leg(self.routes[transfer.source, transfer.destination], transfer.nbytes),)

    def gather_legs(self, source: Tier, nbytes: int) -> tuple[Leg, ...]:
        """Return the legs of gathering a full value: a read of the shard, and with several ranks an all-gather."""
        legs = self._gathers.get((source, nbytes))
        if legs is None:
            shard = Leg(self.routes[source, Tier.DEVICE], shard_size(nbytes, self.num_ranks))
            legs = (shard,) if self.num_ranks == 1 else (shard, Leg(self.links, nbytes))
            self._gathers[source, nbytes] = legs
        return legs

    def gradient_legs(self, home: Tier, nbytes: int, *, is_resident: bool) -> tuple[Leg, ...]:
        """Return the way of a full gradient of so many bytes from the device to its home; () where it stays as it is.

        That of a resident parameter goes over the links twice: its update, in shards, has to come back to every rank.
        """
        reduced = () if self.num_ranks == 1 else (Leg(self.links, nbytes * (2 if is_resident else 1)),)
        if home is Tier.DEVICE:
            return reduced
        return (*reduced, Leg(self.routes[Tier.DEVICE, home], shard_size(nbytes, self.num_ranks)))
