"""Hardware: the rates a prediction is made with. Measured on the machine (``runtime/calibration/calibrate.py``) or given."""

import itertools
import math
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Tier

DEVICE_LINKS, NODE_LINKS = "device links", "node links"  # inside a node, between nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpace:
    """The memory that a device computes in."""

    unified: bool  # with the host's: CPU ops and disk I/O reach what is there, and no bytes cross a link
    # Not unified, but it lies in the host's RAM, and kernels read pinned host memory in place, as on a GB10.
    integrated: bool = False

    @property
    def is_in_ram(self) -> bool:
        """Return whether device and host tier are shares of one RAM."""
        return self.unified or self.integrated

    def is_behind_link(self, tier: Tier) -> bool:
        """Return whether bytes of a tier are reached only by copies on the device's streams."""
        return tier is Tier.DEVICE and not self.unified


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A named rate: FLOP/s of a dtype's matrix products."""

    name: str
    per_second: float


class OpKind(StrEnum):
    """Ops that move bytes at about one rate. Ops of no kind run at the rate of memory copies."""

    ELEMENTWISE = "elementwise"  # add, mul
    TRANSCENDENTAL = "transcendental"  # gelu, tanh, softmax: bounded by arithmetic that no FLOP formula counts
    REDUCTION = "reduction"  # sum, mean, layer norm
    RANDOM = "random"  # dropout: bounded by drawing numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRate:
    """The bytes that ops of a kind read and write per second, for results of a dtype."""

    kind: OpKind
    dtype: str
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How bytes move from one tier to another, for one device. Routes that share a lane take turns on it.

    A disk that reads and writes at once has two lanes, one that does not has one; a route over several links takes them all.
    """

    name: str  # "nvme -> device"
    bytes_per_second: float
    latency_seconds: float
    lanes: tuple[str, ...]
    takes_of_compute: float = 0.0  # seconds that compute loses per second of transfer; 0 with a copy engine

    def seconds_for(self, nbytes: int) -> float:
        """Return how long so many bytes occupy its lanes."""
        return self.latency_seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSize:
    """What one device has of a tier: its own memory, or its share of its node's."""

    tier: Tier
    nbytes: int


def count_ranks_of_replica(world: int, num_replicas: int) -> int:
    """Return how many of a world of ranks each replica has. ConfigError if replicas do not divide them evenly."""
    _check_count(world, "ranks")
    _check_count(num_replicas, "replicas")
    if world % num_replicas:
        raise ConfigError(
            f"{world} ranks do not make {num_replicas} replicas of equally many ranks; give a number of replicas that "
            f"divides {world}, or {max(1, world // num_replicas) * num_replicas} ranks"
        )
    return world // num_replicas


def _are_uneven(num_ranks: int, num_devices: int) -> bool:
    """Return whether groups of so many ranks are spread unevenly over nodes of so many devices."""
    return num_ranks % num_devices > 0 and num_devices % num_ranks > 0


def _describe_worlds(total: int, num_replicas: int, each: int) -> str:
    """Return the numbers of ranks nearest to ``total`` that so many replicas may have on nodes of ``each`` devices."""
    step = math.lcm(each, num_replicas)
    last = total - total % step
    fewer, more = range(last, 0, -step), itertools.count(last + step, step)
    nearest = (
        next((few for few in some if not _are_uneven(few // num_replicas, each)), None) for some in (fewer, more)
    )
    return " or ".join(str(number) for number in nearest if number is not None)


def _check_count(number: int, what: str) -> None:
    if type(number) is not int or number < 1:
        raise ConfigError(f"a world of {number!r} {what} is none; give a whole number, 1 or more")


@cache
def route_name(source: Tier, destination: Tier) -> str:
    """Return how a route is written everywhere: ``"nvme -> device"``."""
    return f"{source} -> {destination}"


def make_route(
    source: Tier,
    destination: Tier,
    bytes_per_second: float,
    *,
    latency_seconds: float = 0.0,
    is_duplex: bool = False,
    takes_of_compute: float = 0.0,
) -> Route:
    """Return a route with the usual lanes: all that touches the disk shares one, unless it reads and writes at once."""
    lane = route_name(source, destination)
    if Tier.NVME in (source, destination):
        lane = "nvme" if not is_duplex else "nvme read" if source is Tier.NVME else "nvme write"
    return Route(
        name=route_name(source, destination),
        bytes_per_second=bytes_per_second,
        latency_seconds=latency_seconds,
        lanes=(lane,),
        takes_of_compute=takes_of_compute,
    )


_DECODES_SLOWER = 8  # than memory: one thread decodes some 2 GB a second, on CPUs whose memory has 10 to 40
_DEVICE_DECODES_SLOWER = 2  # than its memory moves bytes: codes are read, and their values written


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the machine does per second. ``routes`` holds every pair of tiers that bytes move between."""

    name: str
    unified: bool  # its devices compute in host memory, as a CPU and a GB10 do; else each has memory behind a link
    flops: tuple[Rate, ...]  # achievable, by dtype name
    memory_bytes_per_second: float  # of the device
    routes: tuple[Route, ...]
    optimizer_elements_per_second: float  # when nothing else computes
    peak_flops: tuple[Rate, ...] = ()  # of the data sheet, by dtype name; empty if unknown
    tiers: tuple[TierSize, ...] = ()  # empty if only the budgets are limits
    devices_per_node: int = 1
    num_nodes: int = 1
    device_link_bytes_per_second: float = 0.0  # of one device, to others of its node; 0: it has none
    # What links inside a node take. Devices without peer access exchange bytes through host memory, over the lanes of
    # its routes. (): they have lanes of their own, as NVLink.
    device_link_lanes: tuple[str, ...] = ()
    node_link_bytes_per_second: float = 0.0  # of one node, to others
    updates_take_of_compute: float = (
        1.0  # seconds that compute loses per second of update; 0 where other processors update
    )
    links_take_of_compute: float = 0.0  # the same per second of the links; 1 where the CPU computes and copies
    attention_flops: tuple[Rate, ...] = ()  # of attention kernels, by dtype name; empty: as matrix products
    op_rates: tuple[OpRate, ...] = ()  # empty: all as fast as memory copies
    op_overhead_seconds: float = 0.0  # of calling one op, however small its tensors are
    decoded_bytes_per_second: float = (
        0.0  # of rows of int8, counted in what they become, by one thread; 0: not measured
    )
    sources: tuple[str, ...] = ()  # where the numbers are from
    integrated: bool = False  # not unified, but its devices lie in the host's RAM and read pinned memory in place

    @property
    def memory(self) -> MemorySpace:
        """Return the memory that its devices compute in."""
        return MemorySpace(unified=self.unified, integrated=self.integrated)

    def decode_seconds(self, nbytes: int) -> float:
        """Return how long it takes to decode frozen weights to so many bytes: where compute is, by ops or by a thread."""
        if not self.unified:
            return nbytes * _DEVICE_DECODES_SLOWER / self.memory_bytes_per_second
        return nbytes / (self.decoded_bytes_per_second or self.memory_bytes_per_second / _DECODES_SLOWER)

    def with_world(self, num_ranks: int, num_replicas: int = 1) -> "Hardware":
        """Return the hardware with as many nodes as replicas of so many ranks fill, one rank on each device.

        Ranks are counted replica by replica. ConfigError if they do not fill whole nodes, more than one, if the ranks of
        a replica are spread unevenly over nodes, or if their devices are not connected.
        """
        _check_count(num_ranks, "ranks")
        _check_count(num_replicas, "replicas")
        total, each = num_ranks * num_replicas, self.devices_per_node
        if total > each and total % each:
            raise ConfigError(
                f"{total} ranks do not fill whole nodes of {self.name}, which have {each} devices each; give "
                f"{_describe_worlds(total, num_replicas, each)} ranks"
            )
        if total > each and _are_uneven(num_ranks, each):
            raise ConfigError(
                f"{num_replicas} replicas of {num_ranks} ranks each are spread unevenly over nodes of {self.name}, which "
                f"have {each} devices each; give a number of replicas with which each has {each} ranks, a multiple of "
                f"{each} or a divisor of it"
            )
        num_nodes = -(-total // each)
        for links, speed, are_used in (
            (DEVICE_LINKS, self.device_link_bytes_per_second, min(total, each) > 1),
            (NODE_LINKS, self.node_link_bytes_per_second, num_nodes > 1),
        ):
            if are_used and not speed:
                field = f"{links.replace(' links', '_link')}_bytes_per_second"
                raise ConfigError(
                    f"{self.name} has no {links}, which {total} ranks need; give its {field}, such as '70 GB/s'"
                )
        return replace(self, num_nodes=num_nodes)

    def with_mesh(
        self, num_ranks: int, num_replicas: int = 1, *, num_tensor_ranks: int = 1, num_stages: int = 1
    ) -> "Hardware":
        """Return the hardware with as many nodes as a mesh of stages, replicas, ranks and tensor-parallel ranks fills.

        Ranks are counted in this order, those of one tensor-parallel group first. ConfigError if such a group is larger
        than a node or spread over several, and for what ``with_world`` refuses.
        """
        if num_tensor_ranks == num_stages == 1:
            return self.with_world(num_ranks, num_replicas)
        each, of_stage = self.devices_per_node, num_ranks * num_replicas * num_tensor_ranks
        if each % num_tensor_ranks:
            fits = max(size for size in range(1, min(each, num_tensor_ranks) + 1) if each % size == 0)
            raise ConfigError(
                f"{num_tensor_ranks} tensor-parallel ranks do not share a node of {self.name} evenly, which has {each} "
                f"devices; all of them exchange activations in every block, over the links of a node: give {fits}"
            )
        total = of_stage * num_stages
        if total > each and _are_uneven(of_stage, each):
            raise ConfigError(
                f"stages of {of_stage} ranks are spread unevenly over nodes of {self.name}, which have {each} devices each; "
                f"give a world with which a stage has a multiple or a divisor of {each} ranks"
            )
        self.lane(num_tensor_ranks).with_world(num_ranks, num_replicas)
        return replace(self, num_nodes=self.with_world(of_stage, num_stages).num_nodes)

    def lane(self, num_tensor_ranks: int) -> "Hardware":
        """Return the hardware as the ranks see it that have the same place in their tensor-parallel groups.

        These are one device of so many, which share the links between nodes with the others of their group.
        """
        return replace(
            self,
            devices_per_node=self.devices_per_node // num_tensor_ranks,
            node_link_bytes_per_second=self.node_link_bytes_per_second / num_tensor_ranks,
        )

    def links(self, num_ranks: int) -> Route:
        """Return the links of a shard group as a route of full values, which ranks gather from the shard that each has.

        In a ring each device receives what the other ranks have, and each node, meanwhile and once, what the other nodes
        have: the slower of both names the route. Reducing full values to shards takes as long (Patarasuk and Yuan 2009,
        https://doi.org/10.1016/j.jpdc.2008.09.002). More than one rank, as many as ``with_world`` takes.
        """
        num_nodes = max(1, num_ranks // self.devices_per_node)
        speeds = []
        if num_ranks > num_nodes:
            speeds.append((self.device_link_bytes_per_second * num_ranks / (num_ranks - 1), DEVICE_LINKS))
        if num_nodes > 1:
            speeds.append((self.node_link_bytes_per_second * num_nodes / (num_nodes - 1), NODE_LINKS))
        return self._slowest_of(speeds)

    def replica_links(self, num_ranks: int, num_replicas: int) -> Route:
        """Return the links between replicas of so many ranks, as a route of the bytes that one rank passes on.

        All ranks of a replica pass on their shards at the same time, and those in one node share its node links. Where
        some replicas share a node and others do not, the slower links name the route. More than one replica, as many as
        ``with_world`` takes.
        """
        each, total = self.devices_per_node, num_ranks * num_replicas
        speeds = []
        if num_ranks < each:
            speeds.append((self.device_link_bytes_per_second, DEVICE_LINKS))
        if total > each:
            speeds.append((self.node_link_bytes_per_second / min(num_ranks, each), NODE_LINKS))
        return self._slowest_of(speeds)

    def flops_per_second(self, dtype: str) -> float:
        """Return the matrix-product rate of a dtype; of the slowest known dtype for one that was not measured."""
        return _rate_of(dtype, self.flops)

    def attention_flops_per_second(self, dtype: str) -> float:
        """Return the rate of attention kernels, of the slowest known dtype for one that was not measured."""
        return _rate_of(dtype, self.attention_flops or self.flops)

    def op_bytes_per_second(self, kind: OpKind | None, dtype: str) -> float:
        """Return the memory traffic of ops of a kind, of the slowest known dtype for one that was not measured."""
        rates = {rate.dtype: rate.bytes_per_second for rate in self.op_rates if rate.kind is kind}
        return rates.get(dtype, min(rates.values(), default=self.memory_bytes_per_second))

    def route(self, source: Tier, destination: Tier) -> Route:
        """Return a route; KeyError for one the hardware does not have."""
        return {route.name: route for route in self.routes}[route_name(source, destination)]

    def bytes_per_second(self, source: Tier, destination: Tier) -> float:
        """Return a route's bandwidth; KeyError for a route the hardware does not have."""
        return self.route(source, destination).bytes_per_second

    def _slowest_of(self, links: list[tuple[float, str]]) -> Route:
        """Return the slowest of some links, by bytes per second."""
        speed, name = min(links)
        return Route(
            name=name,
            bytes_per_second=speed,
            latency_seconds=0.0,
            lanes=(self.device_link_lanes if name == DEVICE_LINKS else ()) or (name,),
            takes_of_compute=self.links_take_of_compute,
        )


def _rate_of(dtype: str, rates: tuple[Rate, ...]) -> float:
    by_name = {rate.name: rate.per_second for rate in rates}
    return by_name.get(dtype, min(by_name.values()))
