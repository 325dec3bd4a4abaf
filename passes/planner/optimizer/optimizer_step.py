"""The streamed step: the size and number of its chunks, and the bytes they move."""

from collections.abc import Sequence
from math import ceil

from zinf_compile.ir.config import Config
from zinf_compile.ir.copies import LOW_HALVES, Code, StateSpec, chunk_multiple
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.glossary import StepTiming, Tier, format_bytes
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.plan import SMALL_UPDATE_PART, SMALL_UPDATE_SETS, UPDATE_SETS, Placement, StepPlan

# 1 Mi elements are 4 MiB of fp32: large enough for full disk speed, small enough that moments stay in the cache.
_MAX_CHUNK_ELEMENTS = 2**20
# On a device: enough that copies take longer than enqueuing them, 1.3 ms for the master copy over PCIe 5 beside about 0.5.
_MAX_DEVICE_CHUNK_ELEMENTS = 2**24
# Tensors of the master copy's size that an update of a chunk on the device may allocate. AdamW's default allocates three.
_TEMPORARIES = 6
_TABLES_NBYTES = 2 * (2**18 + 4 * 256)  # of int8 on a device: codes by 18 bits of a number, and values, twice each
_DEVICE_SHARE = 16  # a chunk with all its buffers takes at most 1/16 of the device budget
_CHUNKS_IN_FLIGHT = 4  # one being read, one updated, two being written


def chunk_nbytes_per_element(parameter: ParameterFact) -> int:
    """Return the staging bytes per element of a chunk: gradient, master copy, states and compute copy.

    A state that belongs to the whole matrix is in no chunk: such a parameter is updated in one piece.
    """
    master = parameter.master_nbytes // max(1, parameter.num_elements)
    compute = parameter.compute_nbytes // max(1, parameter.num_elements)
    state = -(-parameter.cut_state_nbytes // max(1, parameter.num_elements))
    gradient = parameter.gradient_nbytes // max(1, parameter.num_elements)
    return gradient + master + state + (compute if parameter.has_compute_copy else 0)


def plan_device_share(
    config: Config, hardware: Hardware, parameters: Sequence[ParameterFact], *, num_ranks: int = 1
) -> float:
    """Return the share of elements to update on the device, so that its updates and the host's end at the same time.

    ``update_on`` may force 0 or 1. ``compute="aten"`` forces 1, so that results equal PyTorch's on the device bit for bit.
    An integrated device that updates in place takes all: the host's processors would share its memory's bandwidth.
    """
    trained = [parameter for parameter in parameters if parameter.trainable]
    if config.memory.unified or not trained or config.update_on == "host":
        return 0.0
    is_in_place = config.memory.integrated and num_ranks == 1
    if config.update_on == "device" or config.compute == "aten" or is_in_place:
        return 1.0
    num_elements = sum(parameter.num_elements for parameter in trained)
    moved = sum(chunk_nbytes_per_element(parameter) * parameter.num_elements for parameter in trained) / num_elements
    speeds = (hardware.bytes_per_second(*pair) for pair in ((Tier.HOST, Tier.DEVICE), (Tier.DEVICE, Tier.HOST)))
    on_device = min(speeds) / moved
    return on_device / (on_device + hardware.optimizer_elements_per_second)


def device_chunk_elements(config: Config, parameters: Sequence[ParameterFact]) -> int:
    """Return the elements of a chunk that is updated on the device: about 16 Mi, or fewer on a small device."""
    per_element = _device_nbytes_per_element(parameters)
    fitting = config.device_memory // _DEVICE_SHARE // per_element
    multiple = chunk_multiple(*_encodings_of([parameter for parameter in parameters if parameter.trainable]))
    most = min(_MAX_DEVICE_CHUNK_ELEMENTS, fitting)
    return max(multiple, most - most % multiple)


def device_updates_nbytes(config: Config, parameters: Sequence[ParameterFact]) -> int:
    """Return the device bytes of updates there: buffers of the chunks in flight, temporaries and decoded state of one."""
    trained = [parameter for parameter in parameters if parameter.trainable]
    largest = max((parameter.num_elements for parameter in trained), default=0)
    nbytes = min(device_chunk_elements(config, parameters), largest) * _device_nbytes_per_element(parameters)
    codes = {state.encoding.code for parameter in trained for state in parameter.states}
    return nbytes + (_TABLES_NBYTES if Code.INT8 in codes else 0)


def _device_nbytes_per_element(parameters: Sequence[ParameterFact]) -> int:
    trained = [parameter for parameter in parameters if parameter.trainable and parameter.num_elements]
    num_sets = UPDATE_SETS + SMALL_UPDATE_SETS / SMALL_UPDATE_PART
    sizes = (ceil(chunk_nbytes_per_element(item) * num_sets) for item in trained)
    masters = (-(-item.master_nbytes // item.num_elements) for item in trained)
    decoded = (sum(_decoded_nbytes(state) for state in item.states) for item in trained)
    return max(1, max(sizes, default=0) + _TEMPORARIES * max(masters, default=0) + max(decoded, default=0))


def _decoded_nbytes(state: StateSpec) -> int:
    """Return the bytes of an element of a state that is decoded for an update; 0 where it is updated in place."""
    return 0 if state.encoding.code is None else state.encoding.itemsize


def _encodings_of(parameters: Sequence[ParameterFact]) -> tuple[set[int], set[int]]:
    """Return the elements of a page of all states in codes, and the bytes of an element of all other copies."""
    states = {state.encoding for parameter in parameters for state in parameter.states}
    others = {encoding for each in parameters for encoding in (each.master, each.compute, each.gradient) if encoding}
    pages = {encoding.code.page_elements for encoding in states if encoding.code is not None}
    return pages, {encoding.itemsize for encoding in states | others if encoding.code is None}


def plan_step(
    parameters: Sequence[ParameterFact],
    placements: Sequence[Placement],
    *,
    staging_nbytes: int,
    timing: StepTiming = StepTiming.SYNCHRONOUS,
    device_share: float = 0.0,
    device_chunk: int = _MAX_DEVICE_CHUNK_ELEMENTS,
) -> StepPlan:
    """Return the streamed step over the trainable parameters that have a copy or state on nvme.

    Chunks have at most ``device_chunk`` elements if some are updated on the device. Raises CapacityError when even the
    smallest chunk does not fit ``staging_nbytes``.
    """
    homes = {placement.parameter: placement for placement in placements}
    trainable = [parameter for parameter in parameters if parameter.trainable]
    streamed = [parameter for parameter in trainable if homes[parameter.name].nbytes_on(Tier.NVME)]
    per_element = max((chunk_nbytes_per_element(parameter) for parameter in streamed), default=1)
    limit = device_chunk if device_share else _MAX_CHUNK_ELEMENTS
    pages, itemsizes = _encodings_of(trainable)
    if any(placement.splits_master for placement in placements):
        pages.add(LOW_HALVES)
    multiple = chunk_multiple(pages, itemsizes)
    chunk = min(limit, staging_nbytes // (_CHUNKS_IN_FLIGHT * per_element))
    chunk -= chunk % multiple
    if streamed and chunk == 0:
        needed = 2 * _CHUNKS_IN_FLIGHT * multiple * per_element
        raise CapacityError(
            f"the streamed optimizer step needs staging of {format_bytes(needed // 2)} on host, host_memory leaves "
            f"{format_bytes(staging_nbytes)}; raise host_memory to {-(-needed // 2**20)}MiB"
        )
    moved = [homes[parameter.name] for parameter in streamed]
    read = sum(placement.update_nbytes_read for placement in moved)
    if timing is StepTiming.IN_BACKWARD:  # gradients are not read from disk
        read -= sum(placement.gradient_nbytes for placement in moved if placement.gradient is Tier.NVME)
    return StepPlan(
        timing=timing,
        chunk_elements=chunk if streamed else limit - limit % multiple,
        num_chunks=sum(-(-parameter.num_elements // max(1, chunk)) for parameter in streamed),
        staging_nbytes=staging_nbytes,
        nbytes_read=read,
        nbytes_written=sum(placement.update_nbytes_written for placement in moved),
        num_elements=sum(parameter.num_elements for parameter in trainable),
        device_share=device_share,
    )
