"""Ranks that train one model together: what each keeps of it, and the way full values and gradients go between them.

Every rank keeps its shard of every copy, gradient and optimizer state, but all of a compute copy that is resident. A
gather reads this rank's shard over its route, as all ranks do at once, and then gathers the full value over the links.
A gradient is reduced over the links before its shard leaves. ZeRO stage 3 and bandwidth-centric partitioning:
Rajbhandari et al., arXiv 1910.02054 (section 5) and 2104.07857 (section 6.1).

Several replicas of such ranks may train together. Each rank then adds its shard of a gradient to those of its peers, the
ranks with the same rows in other replicas, before the shard leaves. In order, the shard goes from replica to replica, one
after the other, and the last one broadcasts the total over a binomial tree, as gloo does: in each round every rank that
has the total sends it to one that does not. Otherwise it is an all-reduce in a ring.

Where each of these ranks is one of a tensor-parallel group, a node has fewer of one world, and the worlds share its links.
"""

from dataclasses import dataclass
from functools import cached_property

from zinf_compile.ir.copies import NOT_DECODED, Decoded
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Hardware, Route, route_name
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.slices import shard_size
from zinf_compile.ir.transfers import Moved, Transfer


# Not slotted: its seconds are cached, since a leg belongs to many transfers.
@dataclass(frozen=True)
class Leg:
    """A part of the way of some bytes: over one route, or over the links between the devices."""

    route: Route
    nbytes: int
    decode_seconds: float = 0.0  # behind the bytes, on the processors that move them

    @cached_property
    def seconds(self) -> float:
        """Return how long it takes its lanes."""
        return self.route.seconds_for(self.nbytes) + self.decode_seconds


# Not slotted: what is asked for again and again is worked out once.
@dataclass(frozen=True, kw_only=True)
class World:
    """Replicas of so many ranks, one on each device of some hardware."""

    hardware: Hardware
    num_ranks: int
    num_replicas: int = 1
    is_ordered: bool = True  # whether gradients are added in the order of ranks
    num_tensor_ranks: int = 1  # of the group of which each rank is one; the others are in worlds of their own

    @staticmethod
    def of_plan(plan: Plan) -> "World":
        """Return the ranks that a plan is for."""
        return World(
            hardware=plan.hardware,
            num_ranks=plan.num_ranks,
            num_replicas=plan.num_replicas,
            is_ordered=plan.is_reduced_in_order,
            num_tensor_ranks=plan.num_tensor_ranks,
        )

    @cached_property
    def routes(self) -> dict[tuple[Tier, Tier], Route]:
        """Return the hardware's routes by where they come from and where they lead."""
        named = {route.name: route for route in self.hardware.routes}
        pairs = ((source, destination) for source in Tier for destination in Tier)
        return {pair: named[name] for pair in pairs if (name := route_name(*pair)) in named}

    # Blocks repeat, so cache the legs per tier and size.

    @cached_property
    def _gathers(self) -> dict[tuple[Tier, int, int, int], tuple[Leg, ...]]:
        return {}

    @cached_property
    def _gradients(self) -> dict[tuple[Tier, int, bool], tuple[Leg, ...]]:
        return {}

    @cached_property
    def _activations(self) -> dict[tuple[Tier, Tier, int], tuple[Leg, ...]]:
        return {}

    @cached_property
    def links(self) -> Route:
        """Return the links between the devices of a replica, as a route of full bytes."""
        return self.hardware.lane(self.num_tensor_ranks).links(self.num_ranks)

    @cached_property
    def replica_links(self) -> Route:
        """Return the links between replicas, as a route of the bytes that one rank passes on."""
        return self.hardware.lane(self.num_tensor_ranks).replica_links(self.num_ranks, self.num_replicas)

    def legs(self, transfer: Transfer, *, is_resident: bool = False) -> tuple[Leg, ...]:
        """Return the legs of a transfer, () if no bytes move. ``is_resident`` says where a gradient's parameter is."""
        if transfer.what is Moved.PARAMETERS:
            return self.gather_legs(transfer.source, transfer.moved_nbytes, transfer.decoded)
        if transfer.what is Moved.GRADIENT:
            return self.gradient_legs(transfer.destination, transfer.moved_nbytes, is_resident=is_resident)
        if transfer.stays:
            return ()
        key = transfer.source, transfer.destination, transfer.nbytes
        if key not in self._activations:
            self._activations[key] = (Leg(self.routes[transfer.source, transfer.destination], transfer.nbytes),)
        return self._activations[key]

    def gather_legs(self, source: Tier, nbytes: int, decoded: Decoded = NOT_DECODED) -> tuple[Leg, ...]:
        """Return the legs of gathering a full value: a read of the shard, and with several ranks an all-gather.

        ``nbytes`` move. ``decoded`` says what of them is decoded on arrival, which takes time, too: ranks exchange values.
        """
        key = source, nbytes, decoded.nbytes, decoded.home_nbytes
        legs = self._gathers.get(key)
        if legs is None:
            seconds = self.hardware.decode_seconds(shard_size(decoded.nbytes, self.num_ranks))
            shard = Leg(self.routes[source, Tier.DEVICE], shard_size(nbytes, self.num_ranks), seconds)
            legs = (shard,) if self.num_ranks == 1 else (shard, Leg(self.links, nbytes + decoded.saved_nbytes))
            self._gathers[key] = legs
        return legs

    def gradient_legs(self, home: Tier, nbytes: int, *, is_resident: bool) -> tuple[Leg, ...]:
        """Return the way of a full gradient of so many bytes from the device to its home; () where it stays as it is.

        That of a resident parameter goes over the links twice: its update, in shards, has to come back to every rank.
        Between replicas only its shard goes: they update the same rows.
        """
        known = self._gradients.get((home, nbytes, is_resident))
        if known is not None:
            return known
        legs, shard = [], shard_size(nbytes, self.num_ranks)
        if self.num_ranks > 1:
            legs.append(Leg(self.links, nbytes * (2 if is_resident else 1)))
        if self.num_replicas > 1:
            legs.append(Leg(self.replica_links, self._passed_nbytes(shard)))
        if home is not Tier.DEVICE:
            legs.append(Leg(self.routes[Tier.DEVICE, home], shard))
        self._gradients[home, nbytes, is_resident] = tuple(legs)
        return self._gradients[home, nbytes, is_resident]

    def _passed_nbytes(self, shard: int) -> int:
        """Return the bytes that go from replica to replica, one after the other, until all have the sum of a shard."""
        hops = self.num_replicas - 1
        if self.is_ordered:
            rounds = hops.bit_length()  # each doubles the replicas that have the total
            return (hops + rounds) * shard
        return -(-2 * hops * shard // self.num_replicas)
