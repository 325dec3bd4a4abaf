"""Facts nobody traced: random models of a few blocks with tied, frozen and mixed-precision parameters."""

import random
from collections.abc import Callable, Sequence

import pytest

from zinf_compile.config import Config
from zinf_compile.facts import GradientFact, GraphFacts, OpFact, ParameterFact, UseFact, ValueFact
from zinf_compile.hardware import Hardware, Rate, make_route
from zinf_compile.passes.planning.planner import Request
from zinf_compile.terms import ActivationPolicy, LiveRange, Tier

_SIZES = (16, 4096, 20_000, 70_001, 262_144, 600_000)  # elements: some stay resident for being small


def make_parameter(
    name: str,
    num_elements: int,
    *,
    block: str | None = None,
    compute_dtype: str = "float32",
    trainable: bool = True,
    num_states: int = 2,
) -> ParameterFact:
    """Return a parameter of float32 masters."""
    return ParameterFact(
        name=name,
        block=block if block is not None else name.rpartition(".")[0],
        num_elements=num_elements,
        dtype="float32",
        compute_dtype=compute_dtype,
        master_nbytes=4 * num_elements,
        compute_nbytes=(2 if compute_dtype == "bfloat16" else 4) * num_elements,
        state_nbytes=4 * num_states * num_elements,
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
    """Return a graph of one op a tick, four ticks a module, that reads its parameters in ``dtype``."""
    return GraphFacts(
        name="graph",
        policy=policy,
        num_forward_ticks=num_forward_ticks,
        num_ticks=num_ticks,
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
    """Return a machine on which neither compute nor the disk is free."""
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
        if rng.random() < 0.3:  # a view of it is read later, or it is tied
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
    """Return the planning request of a random model; the same for the same seed but for the budgets."""
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
