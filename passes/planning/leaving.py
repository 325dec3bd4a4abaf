"""Which activations leave the device between forward and backward, and for where. A few levels, from none to all.

First those that nothing reads for the longest: their way out and back is the easiest to hide. They go to host memory if
half of it holds them all, else to nvme. What a level gives the planner is one more graph to find a plan for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from zinf_compile.config import Config
from zinf_compile.facts import GraphFacts, ValueFact
from zinf_compile.hardware import Hardware
from zinf_compile.passes.planning.activations import MIN_BOUND_NBYTES
from zinf_compile.passes.planning.arena import align
from zinf_compile.passes.planning.swaps import plan_swaps
from zinf_compile.plans import ActivationSwap
from zinf_compile.terms import Tier

# Of the bytes that may leave. They do not depend on the device's budget: with more of it none is lost.
_SHARES = (0.5, 1.0)


def leaving_levels(
    graph: GraphFacts, config: Config, hardware: Hardware, seconds_of_ops: Sequence[float] | None = None
) -> Iterator[tuple[ActivationSwap, ...]]:
    """Yield what may leave together, the least first; nothing if no activation may, or no other tier holds it."""
    values = _may_leave(graph)
    nbytes = list(accumulate(align(value.nbytes) for value in values))
    taken = 0
    for share in _SHARES:
        count = sum(total <= share * nbytes[-1] for total in nbytes) if nbytes else 0
        destination = _destination(config, nbytes[count - 1]) if count > taken else None
        if destination is not None:
            taken = count
            yield plan_swaps(graph, {value.name: destination for value in values[:count]}, hardware, seconds_of_ops)


def _may_leave(graph: GraphFacts) -> list[ValueFact]:
    """Return the values that may leave and are large enough to be worth it, those idle for the longest first."""
    idle = [value for value in graph.values if value.idle is not None and value.nbytes >= MIN_BOUND_NBYTES]
    return sorted(idle, key=lambda value: (_idle_ticks(value), value.name))


def _idle_ticks(value: ValueFact) -> int:
    assert value.idle is not None
    return value.idle.start - value.idle.end


def _destination(config: Config, nbytes: int) -> Tier | None:
    # Of the host no more than half, and so little that staging stays what it is.
    if nbytes <= min((config.host_memory - config.staging_memory) // 2, config.host_memory - 2 * config.staging_memory):
        return Tier.HOST
    holds = config.nvme is not None and (config.nvme_memory is None or nbytes <= config.nvme_memory)
    return Tier.NVME if holds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestingBytes:
    """What activations take of host and nvme between forward and backward."""

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
        """Return the config that ``taken_from`` gave this one for."""
        return replace(
            config,
            host_memory=config.host_memory + self.host,
            nvme_memory=None if config.nvme_memory is None else config.nvme_memory + self.nvme,
        )


def count_resting(swaps: Sequence[ActivationSwap]) -> RestingBytes:
    """Return the bytes that swapped activations rest with on each tier."""
    return RestingBytes(
        host=sum(swap.nbytes for swap in swaps if swap.destination is Tier.HOST),
        nvme=sum(swap.nbytes for swap in swaps if swap.destination is Tier.NVME),
    )
