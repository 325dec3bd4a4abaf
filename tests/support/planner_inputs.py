"""Synthetic facts: random models of a few blocks with tied, frozen and mixed-precision parameters."""

import random
from collections.abc import Callable, Sequence

import pytest

from zinf_compile.ir.config import Config
from zinf_compile.ir.copies import Encoding, element_states
from zinf_compile.ir.facts import GradientFact, GraphFacts, OpFact, ParameterFact, UseFact, ValueFact
from zinf_compile.ir.glossary import ActivationPolicy, LiveRange, Tier
from zinf_compile.ir.hardware import Hardware, Rate, make_route
from zinf_compile.ir.schedule import Schedule
from zinf_compile.ir.slices import Slice
from zinf_compile.passes.planner.search.planner import Request

FLOAT32 = Encoding(dtype="float32")
_SIZES = (16, 4096, 20_000, 70_001, 262_144, 600_000)  # elements; the small ones stay resident


def make_parameter(
    name: str,
    num_elements: int,
    *,
    block: str | None = None,
    compute_dtype: str = "float32",
    trainable: bool = True,
    num_states: int = 2,
    width: int = 1,
) -> ParameterFact:
    """Return a parameter of float32 masters, ``width`` elements to a row."""
    shape = (num_elements // width, width) if width > 1 else (num_elements,)
    return ParameterFact(
        name=name,
        slice=Slice.of_whole(name, shape),
        block=block if block is not None else name.rpartition(".")[0],
        master=FLOAT32,
        compute=Encoding(dtype=compute_dtype),
        states=element_states([f"state_{number}" for number in range(num_states)], shape, FLOAT32),
        trainable=trainable,
    )


def make_graph(
    uses: dict[str, Sequence[int]],
    *,
    num_forward_ticks: int,
    num_ticks: int,
    values: Sequence[ValueFact] = (),
    gradients: Sequence[GradientFact] = (),
    dtype: str = "float32",
    policy: ActivationPolicy = ActivationPolicy.SAVE,
) -> GraphFacts:
    """Return a graph with one op per tick and four ticks per module that reads its parameters in ``dtype``."""
    return GraphFacts(
        name="graph",
        policy=policy,
        schedule=Schedule.of_one_graph(num_forward_ticks, num_ticks),
        ops=tuple(
            OpFact(
                tick=tick,
                name=f"op_{tick}",
                op="aten.mm.default",
                module=f"layers.{tick // 4}",
                dtype="float32",
                num_flops=10**6,
                nbytes_accessed=10**4,
            )
            for tick in range(num_ticks)
        ),
        values=tuple(sorted(values, key=lambda value: (value.live.start, value.name))),
        uses=tuple(
            UseFact(parameter=name, dtype=dtype, ticks=tuple(sorted(ticks))) for name, ticks in sorted(uses.items())
        ),
        gradients=tuple(gradients),
    )


def make_hardware() -> Hardware:
    """Return a machine on which both compute and the disk take time."""
    routes = [
        ("host", "device", 8e9),
        ("device", "host", 8e9),
        ("nvme", "device", 2e9),
        ("device", "nvme", 1e9),
        ("nvme", "host", 2e9),
        ("host", "nvme", 1e9),
    ]
    return Hardware(
        name="paper",
        unified=True,
        flops=(Rate(name="float32", per_second=1e10),),
        memory_bytes_per_second=1e10,
        routes=tuple(make_route(Tier(source), Tier(target), speed) for source, target, speed in routes),
        optimizer_elements_per_second=1e9,
    )


def _make_random_graph(rng: random.Random, parameters: Sequence[ParameterFact], policy: ActivationPolicy) -> GraphFacts:
    half = 3 * len(parameters) + rng.randrange(2, 9)
    num_ticks = 2 * half
    uses: dict[str, list[int]] = {}
    gradients = []
    for index, parameter in enumerate(parameters):
        if rng.random() < 0.1:
            continue  # a parameter that this graph does not read
        forward = [3 * index + 1]
        if rng.random() < 0.3:  # a later read through a view, or a tied parameter
            forward.append(rng.randrange(3 * index + 2, half))
        ticks = [*forward, *(num_ticks - 1 - tick for tick in forward if rng.random() < 0.9)]
        uses[parameter.name] = sorted(set(ticks))
        if parameter.trainable:
            tick = num_ticks - 1 - forward[0]
            gradients.append(GradientFact(parameter=parameter.name, tick=tick, nbytes=parameter.gradient_nbytes))
    values = []
    for tick in range(1, num_ticks - 1):
        saved = tick < half and policy is ActivationPolicy.SAVE and rng.random() < 0.3
        end = num_ticks - tick if saved else min(num_ticks, tick + rng.randrange(1, 4))
        nbytes = rng.randrange(1, 200_000)
        live = LiveRange(start=tick, end=max(end, tick + 1))
        bindable = not saved and (tick < half) == (live.end <= half) and rng.random() < 0.5
        idle = LiveRange(start=tick + 1, end=live.end - 1) if saved and tick + 2 < half else None
        values.append(
            ValueFact(name=f"value_{tick}", nbytes=nbytes, live=live, saved=saved, bindable=bindable, idle=idle)
        )
    return make_graph(
        uses,
        num_forward_ticks=half,
        num_ticks=num_ticks,
        values=values,
        gradients=gradients,
        dtype=parameters[0].compute_dtype,
        policy=policy,
    )


def make_request(seed: int, *, device: int = 2**30, host: int = 2**30, nvme: bool = True) -> Request:
    """Return the planning request of a random model. The model depends only on the seed."""
    rng = random.Random(seed)
    compute_dtype = rng.choice(("float32", "bfloat16"))
    parameters = [make_parameter("embed.weight", rng.choice(_SIZES), compute_dtype=compute_dtype)]
    for layer in range(rng.randrange(1, 5)):
        parameters += [
            make_parameter(
                f"layers.{layer}.{name}",
                rng.choice(_SIZES),
                block=f"layers.{layer}",
                compute_dtype=compute_dtype,
                trainable=rng.random() < 0.9,
            )
            for name in ("up", "down", "bias")[: rng.randrange(1, 4)]
        ]
    policies = (ActivationPolicy.SAVE, ActivationPolicy.RECOMPUTE_BLOCKS)[: rng.randrange(1, 3)]
    return Request(
        name="model graph 0",
        candidates=tuple(_make_random_graph(rng, parameters, policy) for policy in policies),
        parameters=tuple(parameters),
        config=Config(
            device_memory=device,
            host_memory=host,
            nvme="/disk" if nvme else None,
            nvme_memory=None,
            compute_dtype=compute_dtype if compute_dtype == "bfloat16" else None,
        ),
        hardware=make_hardware(),
    )


@pytest.fixture(scope="session")
def parameter() -> Callable[..., ParameterFact]:
    """Return ``make_parameter``."""
    return make_parameter


@pytest.fixture(scope="session")
def graph() -> Callable[..., GraphFacts]:
    """Return ``make_graph``."""
    return make_graph


@pytest.fixture(scope="session")
def request_of() -> Callable[..., Request]:
    """Return ``make_request``."""
    return make_request
