"""The streamed step: how large a chunk is, how many there are, and the bytes they move."""

from collections.abc import Sequence

from zinf_compile.errors import CapacityError
from zinf_compile.facts import ParameterFact
from zinf_compile.plan import Placement, StepPlan
from zinf_compile.terms import Tier, format_bytes

# 1 Mi elements are 4 MiB of fp32: large enough for full disk speed, small enough that moments stay in the cache.
_MAX_CHUNK_ELEMENTS = 2**20
# Chunk limits are multiples of this many elements, so that vectorised kernels see the same alignment as on the whole
# tensor and every slice of every dtype starts on a 4 KiB sector.
CHUNK_ALIGN_ELEMENTS = 4096
_CHUNKS_IN_FLIGHT = 4  # one being read, one updated, two being written


def chunk_nbytes_per_element(parameter: ParameterFact, num_states: int) -> int:
    """Return the staging bytes that one element of a chunk takes: gradient, master, states, compute copy."""
    master = parameter.master_nbytes // max(1, parameter.num_elements)
    compute = parameter.compute_nbytes // max(1, parameter.num_elements)
    gradient = compute + (master if parameter.has_compute_copy else 0)  # read in its own dtype, widened to the master's
    return gradient + master * (1 + num_states) + (compute if parameter.has_compute_copy else 0)


def plan_step(
    parameters: Sequence[ParameterFact],
    placements: Sequence[Placement],
    *,
    staging_nbytes: int,
    num_states: int = 2,
) -> StepPlan:
    """Return the streamed step over trainable parameters with something on nvme.

    Raises CapacityError when even the smallest chunk does not fit the staging budget.
    """
    homes = {placement.parameter: placement for placement in placements}
    trainable = [parameter for parameter in parameters if parameter.trainable]
    streamed = [parameter for parameter in trainable if homes[parameter.name].nbytes_on(Tier.NVME)]
    per_element = max((chunk_nbytes_per_element(parameter, num_states) for parameter in streamed), default=1)
    chunk = min(_MAX_CHUNK_ELEMENTS, staging_nbytes // (_CHUNKS_IN_FLIGHT * per_element))
    chunk -= chunk % CHUNK_ALIGN_ELEMENTS
    if streamed and chunk == 0:
        needed = 2 * _CHUNKS_IN_FLIGHT * CHUNK_ALIGN_ELEMENTS * per_element
        raise CapacityError(
            f"the streamed optimizer step needs staging of {format_bytes(needed // 2)} on host, host_memory leaves "
            f"{format_bytes(staging_nbytes)}; raise host_memory to {-(-needed // 2**20)}MiB"
        )
    read = written = 0
    for parameter in streamed:
        home = homes[parameter.name]
        on_nvme = {
            "gradient": home.gradient_nbytes * (home.gradient is Tier.NVME),
            "compute": home.compute_nbytes * (home.compute is Tier.NVME),
            "master": home.master_nbytes * (home.master is Tier.NVME),
            "state": home.optimizer_state_nbytes * (home.optimizer_state is Tier.NVME),
        }
        compute_is_master = home.master_nbytes == 0
        read += on_nvme["gradient"] + on_nvme["master"] + on_nvme["state"]
        read += on_nvme["compute"] if compute_is_master else 0
        written += on_nvme["compute"] + on_nvme["master"] + on_nvme["state"]
    return StepPlan(
        chunk_elements=chunk if streamed else _MAX_CHUNK_ELEMENTS,
        num_chunks=sum(-(-parameter.num_elements // max(1, chunk)) for parameter in streamed),
        staging_nbytes=staging_nbytes,
        nbytes_read=read,
        nbytes_written=written,
        num_elements=sum(parameter.num_elements for parameter in trainable),
    )
