"""The streamed step: how large a chunk is, how many there are, and the bytes they move."""

from collections.abc import Sequence

from zinf_compile.errors import CapacityError
from zinf_compile.facts import ParameterFact
from zinf_compile.plans import Placement, StepPlan
from zinf_compile.terms import StepTiming, Tier, format_bytes

# 1 Mi elements are 4 MiB of fp32: large enough for full disk speed, small enough that moments stay in the cache.
_MAX_CHUNK_ELEMENTS = 2**20
# Chunk limits are multiples of this many elements, so that vectorised kernels see the same alignment as on the whole
# tensor and every slice of every dtype starts on a 4 KiB sector.
CHUNK_ALIGN_ELEMENTS = 4096
_CHUNKS_IN_FLIGHT = 4  # one being read, one updated, two being written


def chunk_nbytes_per_element(parameter: ParameterFact) -> int:
    """Return the staging bytes that one element of a chunk takes: gradient, master, states, compute copy."""
    master = parameter.master_nbytes // max(1, parameter.num_elements)
    compute = parameter.compute_nbytes // max(1, parameter.num_elements)
    state = -(-parameter.state_nbytes // max(1, parameter.num_elements))
    gradient = parameter.gradient_nbytes // max(1, parameter.num_elements)
    return gradient + master + state + (compute if parameter.has_compute_copy else 0)


def plan_step(
    parameters: Sequence[ParameterFact],
    placements: Sequence[Placement],
    *,
    staging_nbytes: int,
    timing: StepTiming = StepTiming.SYNCHRONOUS,
) -> StepPlan:
    """Return the streamed step over trainable parameters with something on nvme.

    Raises CapacityError when even the smallest chunk does not fit the staging budget.
    """
    homes = {placement.parameter: placement for placement in placements}
    trainable = [parameter for parameter in parameters if parameter.trainable]
    streamed = [parameter for parameter in trainable if homes[parameter.name].nbytes_on(Tier.NVME)]
    per_element = max((chunk_nbytes_per_element(parameter) for parameter in streamed), default=1)
    chunk = min(_MAX_CHUNK_ELEMENTS, staging_nbytes // (_CHUNKS_IN_FLIGHT * per_element))
    chunk -= chunk % CHUNK_ALIGN_ELEMENTS
    if streamed and chunk == 0:
        needed = 2 * _CHUNKS_IN_FLIGHT * CHUNK_ALIGN_ELEMENTS * per_element
        raise CapacityError(
            f"the streamed optimizer step needs staging of {format_bytes(needed // 2)} on host, host_memory leaves "
            f"{format_bytes(staging_nbytes)}; raise host_memory to {-(-needed // 2**20)}MiB"
        )
    moved = [homes[parameter.name] for parameter in streamed]
    read = sum(placement.update_nbytes_read for placement in moved)
    if timing is StepTiming.IN_BACKWARD:  # gradients do not come from disk
        read -= sum(placement.gradient_nbytes for placement in moved if placement.gradient is Tier.NVME)
    return StepPlan(
        timing=timing,
        chunk_elements=chunk if streamed else _MAX_CHUNK_ELEMENTS,
        num_chunks=sum(-(-parameter.num_elements // max(1, chunk)) for parameter in streamed),
        staging_nbytes=staging_nbytes,
        nbytes_read=read,
        nbytes_written=sum(placement.update_nbytes_written for placement in moved),
        num_elements=sum(parameter.num_elements for parameter in trainable),
    )
