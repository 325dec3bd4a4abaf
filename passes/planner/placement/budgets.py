"""Refuses budgets in which no graph of a model can run, however small its activations, before any byte is moved."""

import math
from collections.abc import Sequence

from zinf_compile.ir.config import LEAST_TILE, Config
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.glossary import Tier, format_bytes
from zinf_compile.ir.plan import Placement
from zinf_compile.passes.planner.memory.arena import align
from zinf_compile.passes.planner.optimizer.optimizer_step import plan_step
from zinf_compile.passes.planner.placement.homes import MIN_STAGING, plan_placement, size_option, with_device_memory


def check_budgets(parameters: Sequence[ParameterFact], placements: Sequence[Placement], config: Config) -> None:
    """Raise CapacityError if no graph of the model can run within the budgets, however small its activations.

    The device must hold the small residents and the largest other parameter; staging must hold chunks of the step.
    """
    if _least_device_memory(placements, config) > config.device_memory:
        needed = _search_device_memory(parameters, config)
        if config.stage < 3:
            raise CapacityError(
                f"device_memory is {format_bytes(config.device_memory)}, and stage={config.stage} keeps the copies that "
                f"compute reads on the device, which needs {format_bytes(needed)} before any activations; raise "
                f"device_memory to {size_option(needed)} plus activation memory, or say stage=3"
            )
        streamed = [item for item in placements if item.compute is not Tier.DEVICE]
        largest = sorted(streamed, key=lambda item: -item.compute_nbytes)[:3]
        names = ", ".join(f"{item.parameter} {format_bytes(item.compute_nbytes)}" for item in largest)
        raise CapacityError(
            f"device_memory is {format_bytes(config.device_memory)}, and the largest parameter{_or_tile(config)} with its "
            f"gradient needs "
            f"{format_bytes(needed)} before any activations; largest: {names}; raise device_memory to "
            f"{size_option(needed)} plus activation memory"
        )
    plan_step(parameters, placements, staging_nbytes=config.staging_memory)
    if any(item.nbytes_on(Tier.NVME) for item in placements) and config.staging_memory < MIN_STAGING:
        raise CapacityError(
            f"host_memory is {format_bytes(config.host_memory)}, and moving parameters to nvme needs staging of "
            f"{format_bytes(MIN_STAGING)}; raise host_memory to {size_option(2 * MIN_STAGING)}"
        )


def check_staying(placements: Sequence[Placement], config: Config, staying: str, *, beside: int) -> None:
    """Raise CapacityError if there is no room for a parameter that stays in host memory, because somebody holds it there.

    ``beside`` are the bytes that plans need of host memory beside homes.
    """
    needed = beside + sum(item.nbytes_on(Tier.HOST) for item in placements)
    if needed > config.host_memory:
        raise CapacityError(
            f"'{staying}' was written to through a tensor that somebody holds, so it stays in host memory: training "
            f"then needs {format_bytes(needed)} there; host_memory is {format_bytes(config.host_memory)}; drop that tensor, "
            f"write into the parameter itself, or raise host_memory to {size_option(needed)}"
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
    streamed = [
        align(int(min(item.compute_nbytes, most)))
        for item in placements
        if item.home_read(item.compute_dtype) is not Tier.DEVICE
    ]
    return resident + 2 * max(streamed, default=0)


def _search_device_memory(parameters: Sequence[ParameterFact], config: Config) -> int:
    """Return the smallest device budget that ``check_budgets`` accepts. More is resident with a larger one."""
    needed = config.device_memory
    while True:
        least = _least_device_memory(plan_placement(parameters, with_device_memory(config, needed)), config)
        if least <= needed:
            return needed
        needed = least
