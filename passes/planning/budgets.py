"""Budgets in which no graph of a model could run, whatever its activations: refused before anything has moved."""

import math
from collections.abc import Sequence

from zinf_compile.config import LEAST_TILE, Config
from zinf_compile.errors import CapacityError
from zinf_compile.facts import ParameterFact
from zinf_compile.passes.planning.arena import align
from zinf_compile.passes.planning.optimizer_step import plan_step
from zinf_compile.passes.planning.placement import MIN_STAGING, plan_placement, size_option, with_device_memory
from zinf_compile.plans import Placement
from zinf_compile.terms import Tier, format_bytes


def check_budgets(parameters: Sequence[ParameterFact], placements: Sequence[Placement], config: Config) -> None:
    """Raise CapacityError if no graph of the model could ever run within the budgets, whatever its activations.

    The device must hold the small residents and the largest other parameter; staging must hold chunks of the step.
    """
    if _least_device_memory(placements, config) > config.device_memory:
        needed = _search_device_memory(parameters, config)
        streamed = [item for item in placements if item.compute is not Tier.DEVICE]
        largest = sorted(streamed, key=lambda item: -item.compute_nbytes)[:3]
        names = ", ".join(f"{item.parameter} {format_bytes(item.compute_nbytes)}" for item in largest)
        raise CapacityError(
            f"device_memory is {format_bytes(config.device_memory)}, and the largest parameter{_or_tile(config)} with its "
            f"gradient needs "
            f"{format_bytes(needed)} before any activations; largest: {names}; raise device_memory to "
            f"{size_option(needed)} and as much as the activations need"
        )
    plan_step(parameters, placements, staging_nbytes=config.staging_memory)
    if any(item.nbytes_on(Tier.NVME) for item in placements) and config.staging_memory < MIN_STAGING:
        raise CapacityError(
            f"host_memory is {format_bytes(config.host_memory)}, and moving parameters to nvme needs staging of "
            f"{format_bytes(MIN_STAGING)}; raise host_memory to {size_option(2 * MIN_STAGING)}"
        )


def _may_tile(config: Config) -> bool:
    return config.capture and config.tiles is not None


def _or_tile(config: Config) -> str:
    return ", or tile of one," if _may_tile(config) else ""


def _least_device_memory(placements: Sequence[Placement], config: Config) -> int:
    """Return the bytes of what is resident, and of the largest other parameter, or tile of one, with its gradient."""
    resident = sum(placement.nbytes_on(Tier.DEVICE) for placement in placements)
    most = (
        LEAST_TILE if config.capture and config.tiles is not None else math.inf
    )  # whether it can be tiled, the graphs will say
    streamed = [align(int(min(item.compute_nbytes, most))) for item in placements if item.compute is not Tier.DEVICE]
    return resident + 2 * max(streamed, default=0)


def _search_device_memory(parameters: Sequence[ParameterFact], config: Config) -> int:
    """Return the smallest device budget that ``check_budgets`` lets pass; the larger it is, the more is resident."""
    needed = config.device_memory
    while True:
        least = _least_device_memory(plan_placement(parameters, with_device_memory(config, needed)), config)
        if least <= needed:
            return needed
        needed = least
