"""The streamed step: chunks that fit staging, and the bytes that go over the disk."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zinf_compile.ir.config import Config
from zinf_compile.ir.copies import Code, Encoding, Granularity, StateSpec, chunk_multiple, encoded_state
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Hardware, Rate, make_route
from zinf_compile.passes.planner.optimizer.optimizer_step import (
    chunk_nbytes_per_element,
    device_chunk_elements,
    device_updates_nbytes,
    plan_device_share,
    plan_step,
)
from zinf_compile.passes.planner.placement.homes import plan_placement

Function = Callable[..., Any]
ALL_ON_NVME = Config(device_memory=0, host_memory=0, nvme="/disk", nvme_memory=None)
ALL_ON_HOST = Config(device_memory=0, host_memory=2**32, nvme=None, nvme_memory=None)
IN_FLIGHT = 4
CHUNK_ALIGN_ELEMENTS = chunk_multiple()


@pytest.mark.parametrize(
    ("compute_dtype", "num_states", "nbytes"),
    [
        ("float32", 2, 4 + 4 * 3),  # gradient; master and two moments
        ("float32", 1, 4 + 4 * 2),
        ("float32", 0, 4 + 4),
        ("bfloat16", 2, 2 + 4 * 3 + 2),  # gradient; master and moments; compute copy
    ],
)
def test_staging_bytes_of_an_element(parameter: Function, compute_dtype: str, num_states: int, nbytes: int) -> None:
    fact = parameter("a.weight", 1000, compute_dtype=compute_dtype, num_states=num_states)
    assert chunk_nbytes_per_element(fact) == nbytes


def test_state_of_the_whole_matrix_is_in_no_chunk(parameter: Function) -> None:
    fact = parameter("a.weight", 1000)
    matrix = StateSpec(
        name="matrix", shape=(10**6,), encoding=Encoding(dtype="float32"), granularity=Granularity.MATRIX
    )
    other = replace(fact, states=(*fact.states, matrix))
    assert chunk_nbytes_per_element(other) == chunk_nbytes_per_element(fact)
    steps = [plan_step([each], plan_placement([each], ALL_ON_NVME), staging_nbytes=2**24) for each in (fact, other)]
    assert steps[0].chunk_elements == steps[1].chunk_elements
    assert steps[1].nbytes_read - steps[0].nbytes_read == 4 * 10**6


@pytest.mark.parametrize(
    ("staging", "chunk"),
    [
        (IN_FLIGHT * 16 * CHUNK_ALIGN_ELEMENTS, CHUNK_ALIGN_ELEMENTS),
        (IN_FLIGHT * 16 * (2 * CHUNK_ALIGN_ELEMENTS) - 1, CHUNK_ALIGN_ELEMENTS),
        (IN_FLIGHT * 16 * (5 * CHUNK_ALIGN_ELEMENTS), 5 * CHUNK_ALIGN_ELEMENTS),
        (2**40, 2**20),
    ],
)
def test_chunks_are_whole_sectors_within_staging(parameter: Function, staging: int, chunk: int) -> None:
    parameters = [parameter("a.weight", 100_000), parameter("b.weight", 1)]
    step = plan_step(parameters, plan_placement(parameters, ALL_ON_NVME), staging_nbytes=staging)
    assert step.chunk_elements == chunk
    assert step.chunk_elements % CHUNK_ALIGN_ELEMENTS == 0
    assert step.num_chunks == -(-100_000 // chunk) + 1
    assert IN_FLIGHT * 16 * step.chunk_elements <= staging or chunk == 2**20


def test_the_widest_parameter_sets_the_chunk(parameter: Function) -> None:
    staging = IN_FLIGHT * 20 * CHUNK_ALIGN_ELEMENTS
    parameters = [parameter("a.weight", 10), parameter("b.weight", 10, num_states=3)]
    placements = plan_placement(parameters, ALL_ON_NVME)
    assert plan_step(parameters, placements, staging_nbytes=staging).chunk_elements == CHUNK_ALIGN_ELEMENTS
    with pytest.raises(CapacityError):
        plan_step(parameters, placements, staging_nbytes=staging - 1)


def test_staging_for_less_than_a_chunk_is_refused(parameter: Function) -> None:
    parameters = [parameter("a.weight", 10)]
    placements = plan_placement(parameters, ALL_ON_NVME)
    needed = IN_FLIGHT * 16 * CHUNK_ALIGN_ELEMENTS
    message = r"needs staging of 256.0 KiB on host, host_memory leaves 256.0 KiB; raise host_memory to 1MiB"
    with pytest.raises(CapacityError, match=message):
        plan_step(parameters, placements, staging_nbytes=needed - 1)


def test_bytes_over_the_disk_with_one_copy(parameter: Function) -> None:
    parameters = [parameter("a.weight", 1000), parameter("frozen.weight", 1000, trainable=False)]
    step = plan_step(parameters, plan_placement(parameters, ALL_ON_NVME), staging_nbytes=2**30)
    assert step.nbytes_read == 1000 * (4 + 4 + 8)  # gradient, parameter, moments
    assert step.nbytes_written == 1000 * (4 + 8)  # parameter, moments
    assert step.num_elements == 1000


def test_bytes_over_the_disk_with_a_compute_copy(parameter: Function) -> None:
    parameters = [parameter("a.weight", 1000, compute_dtype="bfloat16")]
    step = plan_step(parameters, plan_placement(parameters, ALL_ON_NVME), staging_nbytes=2**30)
    assert step.nbytes_read == 1000 * (2 + 4 + 8)  # gradient, master, moments: the compute copy is only written
    assert step.nbytes_written == 1000 * (2 + 4 + 8)


def test_in_memory_nothing_goes_over_the_disk(parameter: Function) -> None:
    parameters = [parameter("a.weight", 1000)]
    placements = plan_placement(parameters, ALL_ON_HOST)
    step = plan_step(parameters, placements, staging_nbytes=0)
    assert placements[0].nbytes_on(Tier.NVME) == 0
    assert (step.nbytes_read, step.nbytes_written, step.num_chunks, step.num_elements) == (0, 0, 0, 1000)


def _gpu(**options: object) -> Config:
    return Config(device_memory=2**34, host_memory=2**34, nvme=None, nvme_memory=None, unified=False, **options)


def test_where_updates_run(parameter: Function) -> None:
    parameters = [parameter("a.weight", 1000, compute_dtype="bfloat16"), parameter("b.weight", 10, trainable=False)]
    machine = Hardware(
        name="a GPU",
        unified=True,
        flops=(Rate(name="bfloat16", per_second=1e14),),
        memory_bytes_per_second=1e12,
        routes=(make_route(Tier.HOST, Tier.DEVICE, 32e9), make_route(Tier.DEVICE, Tier.HOST, 16e9)),
        optimizer_elements_per_second=3e9,
    )
    # At most 16 bytes per element each way, so that the device updates 1e9 elements per second.
    assert plan_device_share(_gpu(compute="inductor"), machine, parameters) == pytest.approx(0.25)
    assert plan_device_share(_gpu(compute="aten"), machine, parameters) == 1.0, "aten has PyTorch's bits on the device"
    assert plan_device_share(_gpu(compute="inductor", update_on="device"), machine, parameters) == 1.0
    assert plan_device_share(_gpu(update_on="host"), machine, parameters) == 0.0
    assert plan_device_share(_gpu(), machine, parameters[1:]) == 0.0
    assert plan_device_share(ALL_ON_HOST, machine, parameters) == 0.0
    integrated = replace(_gpu(compute="inductor"), integrated=True)
    assert plan_device_share(integrated, machine, parameters) == 1.0, "it updates host memory in place"
    assert plan_device_share(integrated, machine, parameters, num_ranks=2) == pytest.approx(0.25)
    assert plan_device_share(replace(integrated, update_on="host"), machine, parameters) == 0.0


@pytest.mark.parametrize(
    ("device_memory", "chunk"),
    [(2**36, 2**24), (2**34, 3591 * 4096), (2**20, CHUNK_ALIGN_ELEMENTS), (2**26, 14 * 4096)],
)
def test_chunks_on_the_device_take_a_small_part_of_it(parameter: Function, device_memory: int, chunk: int) -> None:
    parameters = [parameter("a.weight", 20_000_000, compute_dtype="bfloat16")]
    config = replace(_gpu(), device_memory=device_memory)
    assert device_chunk_elements(config, parameters) == chunk
    nbytes = device_updates_nbytes(config, parameters)
    assert nbytes == chunk * (3 * 16 + 1 + 6 * 4)
    assert nbytes <= max(device_memory // 16, CHUNK_ALIGN_ELEMENTS * (3 * 16 + 1 + 6 * 4))


@pytest.mark.parametrize(
    ("code", "of_states", "tables"), [(Code.INT8, 3, 2 * (2**18 + 2**10)), (Code.BFLOAT16, 4, 0)], ids=str
)
def test_chunks_on_the_device_whose_state_is_decoded(
    parameter: Function, code: Code, of_states: int, tables: int
) -> None:
    """The pages of a chunk are in its buffers, and the values of one chunk in memory of their own."""
    exact = parameter("a.weight", 700 * 30_720, compute_dtype="bfloat16")
    coded = replace(exact, states=tuple(encoded_state(state, code) for state in exact.states))
    per_element = {exact: 3 * 16 + 1 + 6 * 4, coded: 3 * (8 + of_states) + 1 + 6 * 4 + 2 * 4}
    assert per_element[coded] < per_element[exact]
    chunks = {}
    for device_memory in (2**36, 2**34, 2**26, 2**20):
        config = replace(_gpu(), device_memory=device_memory)
        chunk = chunks[device_memory] = device_chunk_elements(config, [coded])
        multiple = chunk_multiple([code.page_elements], [4, 2])
        assert chunk % multiple == 0
        assert device_updates_nbytes(config, [coded]) == chunk * per_element[coded] + tables
        assert chunk == multiple or chunk * per_element[coded] <= device_memory // 16
        placements = plan_placement([coded], replace(ALL_ON_HOST, unified=False))
        step = plan_step([coded], placements, staging_nbytes=0, device_share=1.0, device_chunk=chunk)
        assert step.chunk_elements == chunk
    assert chunks[2**36] > 0.99 * 2**24
    assert chunks[2**20] == multiple


def test_a_share_of_updates_moves_codes(parameter: Function) -> None:
    """With fewer bytes over the link the device has more of the updates."""
    machine = Hardware(
        name="a GPU",
        unified=True,
        flops=(Rate(name="bfloat16", per_second=1e14),),
        memory_bytes_per_second=1e12,
        routes=(make_route(Tier.HOST, Tier.DEVICE, 32e9), make_route(Tier.DEVICE, Tier.HOST, 16e9)),
        optimizer_elements_per_second=3e9,
    )
    exact = parameter("a.weight", 700 * 30_720, compute_dtype="bfloat16")
    coded = replace(exact, states=tuple(encoded_state(state, Code.BFLOAT16) for state in exact.states))
    shares = [plan_device_share(_gpu(compute="inductor"), machine, [each]) for each in (exact, coded)]
    assert shares == pytest.approx([0.25, 16 / 12 / (16 / 12 + 3)], rel=1e-3)
