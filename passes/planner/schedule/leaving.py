"""Which activations are offloaded between forward and backward, and where to: a few levels, from none to all.

Values that are idle for the longest come first, since their transfers are the easiest to hide. They go to host memory
if half of it can hold them all, and otherwise to nvme. Each level is one more graph for the planner.

If nothing else fits, all of them leave one at a time, and compute waits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from zinf_compile.ir.config import Config
from zinf_compile.ir.facts import GraphFacts, ValueFact
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.transfers import Transfer, pair_swaps
from zinf_compile.passes.planner.memory.activations import MIN_BOUND_NBYTES
from zinf_compile.passes.planner.memory.arena import align
from zinf_compile.passes.planner.schedule.swaps import plan_swaps

# Of the bytes that may leave. Independent of the device's budget, so that more memory never makes a plan slower.
_SHARES = (0.5, 1.0)


def leaving_levels(
    graph: GraphFacts,
    config: Config,
    hardware: Hardware,
    seconds_of_ops: Sequence[float] | None = None,
    *,
    num_forwards: int = 1,
) -> Iterator[tuple[Transfer, ...]]:
    """Yield the offloads and reloads of each level, the fewest first.

    Yields nothing if no activation may leave, or no other tier can hold it. ``num_forwards`` are open at the same time.
    """
    values = _may_leave(graph)
    nbytes = list(accumulate(align(value.nbytes) for value in values))
    taken = 0
    for share in _SHARES:
        count = sum(total <= share * nbytes[-1] for total in nbytes) if nbytes else 0
        destination = _destination(config, num_forwards * nbytes[count - 1]) if count > taken else None
        if destination is not None:
            taken = count
            destinations = {value.name: destination for value in values[:count]}
            yield plan_swaps(graph, destinations, hardware, seconds_of_ops, in_place=config.integrated)


def waiting_level(
    graph: GraphFacts,
    config: Config,
    hardware: Hardware,
    seconds_of_ops: Sequence[float] | None = None,
    *,
    num_forwards: int = 1,
) -> tuple[Transfer, ...]:
    """Return the offloads and reloads of the last level, one at a time; nothing if they are so without waiting."""
    at_once: tuple[Transfer, ...] = ()
    for swaps in leaving_levels(graph, config, hardware, seconds_of_ops, num_forwards=num_forwards):
        at_once = swaps
    destinations = {swap.value: swap.rests_on for swap in pair_swaps(at_once)}
    in_turn = plan_swaps(graph, destinations, hardware, seconds_of_ops, in_place=config.integrated, one_at_a_time=True)
    return () if in_turn == at_once else in_turn


def _may_leave(graph: GraphFacts) -> list[ValueFact]:
    """Return the values that may leave and are large enough to be worth it, those idle for the longest first."""
    idle = [value for value in graph.values if value.idle is not None and value.nbytes >= MIN_BOUND_NBYTES]
    return sorted(idle, key=lambda value: (_idle_ticks(value), value.name))


def _idle_ticks(value: ValueFact) -> int:
    assert value.idle is not None
    return value.idle.start - value.idle.end


def _destination(config: Config, nbytes: int) -> Tier | None:
    # At most half of the host, and so little that the size of staging does not change.
    if nbytes <= min((config.host_memory - config.staging_memory) // 2, config.host_memory - 2 * config.staging_memory):
        return Tier.HOST
    holds = config.nvme is not None and (config.nvme_memory is None or nbytes <= config.nvme_memory)
    return Tier.NVME if holds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestingBytes:
    """The bytes that offloaded activations take of host and nvme between forward and backward."""

    host: int
    nvme: int

    def taken_from(self, config: Config) -> Config:
        """Return the config that is left to plan with: host and nvme are smaller by these bytes."""
        return replace(
            config,
            host_memory=config.host_memory - self.host,
            nvme_memory=None if config.nvme_memory is None else config.nvme_memory - self.nvme,
        )

    def returned_to(self, config: Config) -> Config:
        """Return the config that ``taken_from`` was called with to get this one."""
        return replace(
            config,
            host_memory=config.host_memory + self.host,
            nvme_memory=None if config.nvme_memory is None else config.nvme_memory + self.nvme,
        )


def count_resting(swaps: Sequence[Transfer], *, num_forwards: int = 1) -> RestingBytes:
    """Return the bytes that offloaded activations of open forwards take of each tier; ``swaps`` are those of one."""
    return RestingBytes(
        host=num_forwards * sum(each.nbytes for each in swaps if each.is_offload and each.destination is Tier.HOST),
        nvme=num_forwards * sum(each.nbytes for each in swaps if each.is_offload and each.destination is Tier.NVME),
    )
