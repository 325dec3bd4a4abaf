"""Plans made by hand: a small one whose timeline is easy to compute, and one with any number of layers."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from tests.support.planner_inputs import make_parameter
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.inspect.reports import PhaseReport, Report, StepReport, TierReport
from zinf_compile.ir.copies import Encoding, Role
from zinf_compile.ir.facts import UseFact
from zinf_compile.ir.glossary import ActivationPolicy, LiveRange, Phase, StepTiming, Tier
from zinf_compile.ir.hardware import Hardware, Rate, make_route
from zinf_compile.ir.plan import (
    PLAN_VERSION,
    ActivationPlan,
    BoundValue,
    ComputeSpan,
    Placement,
    Plan,
    StepPlan,
    TierPart,
    TierPlan,
)
from zinf_compile.ir.schedule import Schedule
from zinf_compile.ir.transfers import Moved, Swap, Transfer, order_transfers
from zinf_compile.passes.planner.placement.homes import make_placement

MIB = 2**20


def _make_hardware(name: str, *, disk: float, memory: float, elements: float) -> Hardware:
    return Hardware(
        name=name,
        unified=True,
        flops=(Rate(name="float32", per_second=1e12),),
        memory_bytes_per_second=memory,
        routes=(
            make_route(Tier.DEVICE, Tier.HOST, memory),
            make_route(Tier.DEVICE, Tier.NVME, disk / 2),
            make_route(Tier.HOST, Tier.DEVICE, memory),
            make_route(Tier.HOST, Tier.NVME, disk / 2),
            make_route(Tier.NVME, Tier.DEVICE, disk),
            make_route(Tier.NVME, Tier.HOST, disk),
        ),
        optimizer_elements_per_second=elements,
    )


def _make_placement(
    parameter: str, compute: Tier, rest: Tier, nbytes: int, *, master: int = 0, trainable: bool = True
) -> Placement:
    dtype = "bfloat16" if master else "float32"
    num_elements = nbytes // (2 if master else 4)
    fact = make_parameter(parameter, num_elements, compute_dtype=dtype, trainable=trainable)
    homes = dict.fromkeys(Role, rest) | {Role.COMPUTE: compute}
    return make_placement(fact, homes)


def narrow(placement: Placement) -> Placement:
    """Return a placement with an additional bfloat16 compute copy; the only copy becomes the float32 master copy."""
    (compute,) = placement.by_role[Role.COMPUTE]
    copies = (replace(compute, encoding=Encoding(dtype="bfloat16")), replace(compute, role=Role.MASTER))
    return replace(placement, copies=(*copies, *placement.copies[1:]))


def _make_transfer(name: str, offset: int, issue: int, need_by: int, release: int) -> Transfer:
    return Transfer(
        what=Moved.PARAMETERS,
        name=name,
        parameters=(f"{name}.weight",),
        source=Tier.NVME,
        destination=Tier.DEVICE,
        nbytes=200,
        issue=issue,
        need_by=need_by,
        release=release,
        offsets=(offset,),
    )


def _make_bound(name: str, offset: int, nbytes: int, start: int, end: int) -> BoundValue:
    return BoundValue(name=name, offset=offset, nbytes=nbytes, live=LiveRange(start=start, end=end))


def _make_span(module: str, phase: Phase, start: int, end: int, seconds: float, peak_nbytes: int) -> ComputeSpan:
    return ComputeSpan(module=module, phase=phase, start=start, end=end, seconds=seconds, peak_nbytes=peak_nbytes)


def make_sink(parameter: str, tick: int, destination: Tier, nbytes: int, *, end: int = 12) -> Transfer:
    """Return the transfer of a gradient that is complete after ``tick``, in a backward that ends at ``end``."""
    return Transfer(
        what=Moved.GRADIENT,
        name=parameter,
        parameters=(parameter,),
        source=Tier.DEVICE,
        destination=destination,
        nbytes=nbytes,
        issue=tick + 1,
        need_by=end,
        release=end,
    )


def make_swap(
    value: str, tier: Tier, nbytes: int, *, out: int, gone: int, issue: int, need_by: int, release: int, offset: int = 0
) -> Swap:
    """Return the swap of an activation: offloaded after tick ``out``, gone by ``gone``, reloaded from ``issue`` on."""
    offload = Transfer(
        what=Moved.ACTIVATION,
        name=value,
        parameters=(),
        source=Tier.DEVICE,
        destination=tier,
        nbytes=nbytes,
        issue=out + 1,
        need_by=gone,
        release=gone,
    )
    reload = replace(
        offload,
        source=tier,
        destination=Tier.DEVICE,
        issue=issue,
        need_by=need_by,
        release=release,
        offsets=(offset,),
    )
    return Swap(offload, reload)


def with_transfers(
    plan: Plan,
    *,
    gathers: Iterable[Transfer] | None = None,
    sinks: Iterable[Transfer] | None = None,
    swaps: Iterable[Swap] | None = None,
    **changes: object,
) -> Plan:
    """Return a plan with its transfers of the given kinds replaced, and with other changes."""
    transfers = [
        *(plan.gathers if gathers is None else gathers),
        *(plan.sinks if sinks is None else sinks),
        *(transfer for swap in (plan.swaps if swaps is None else swaps) for transfer in swap),
    ]
    return replace(plan, transfers=order_transfers(transfers), **changes)


def make_small_plan() -> Plan:
    """Return a plan of an embedding and two layers: one second per tick, the disk reads 100 and writes 50 bytes/s."""
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    return Plan(
        version=PLAN_VERSION,
        name="small",
        compute_dtype=None,
        hardware=_make_hardware("paper", disk=100.0, memory=1000.0, elements=10.0),
        schedule=Schedule.of_one_graph(6, 12),
        placements=(
            _make_placement("embed.weight", Tier.DEVICE, Tier.HOST, 64),
            _make_placement("layers.0.bias", Tier.DEVICE, Tier.HOST, 8),
            _make_placement("layers.0.weight", Tier.NVME, Tier.NVME, 200),
            _make_placement("layers.1.bias", Tier.DEVICE, Tier.HOST, 8),
            _make_placement("layers.1.weight", Tier.NVME, Tier.NVME, 200),
        ),
        uses=(
            UseFact(parameter="embed.weight", dtype="float32", ticks=(0, 11)),
            UseFact(parameter="layers.0.bias", dtype="float32", ticks=(1,)),
            UseFact(parameter="layers.0.weight", dtype="float32", ticks=(1, 2, 9, 10)),
            UseFact(parameter="layers.1.bias", dtype="float32", ticks=(3,)),
            UseFact(parameter="layers.1.weight", dtype="float32", ticks=(3, 4, 7, 8)),
        ),
        transfers=(
            _make_transfer("layers.0", 0, 0, 1, 3),
            _make_transfer("layers.1", 256, 1, 3, 5),
            _make_transfer("layers.1", 256, 6, 7, 9),
            _make_transfer("layers.0", 0, 7, 9, 11),
            make_sink("layers.1.weight", 8, Tier.NVME, 200),
            make_sink("layers.0.weight", 10, Tier.NVME, 200),
            make_sink("embed.weight", 11, Tier.HOST, 64),
        ),
        bound=(
            _make_bound("linear", 456, 32, 1, 3),
            _make_bound("gelu", 488, 24, 2, 4),
            _make_bound("linear_1", 456, 40, 4, 6),
            _make_bound("mm", 456, 56, 7, 9),
            _make_bound("mm_1", 456, 32, 9, 10),
        ),
        spans=(
            _make_span("embed", forward, 0, 1, 1.0, 40),
            _make_span("layers.0", forward, 1, 3, 2.0, 80),
            _make_span("layers.1", forward, 3, 5, 2.0, 120),
            _make_span("loss", forward, 5, 6, 1.0, 160),
            _make_span("loss", backward, 6, 7, 1.0, 160),
            _make_span("layers.1", backward, 7, 9, 2.0, 140),
            _make_span("layers.0", backward, 9, 11, 2.0, 100),
            _make_span("embed", backward, 11, 12, 1.0, 60),
        ),
        activations=ActivationPlan(policy=ActivationPolicy.SAVE, saved_nbytes=120, peak_nbytes=160, peak_tick=5),
        arena_nbytes=512,
        prefetch_nbytes=400,
        step=StepPlan(
            timing=StepTiming.SYNCHRONOUS,
            chunk_elements=25,
            num_chunks=4,
            staging_nbytes=800,
            nbytes_read=1600,
            nbytes_written=1200,
            num_elements=120,
        ),
        tiers=(
            TierPlan(
                tier=Tier.DEVICE,
                capacity=1000,
                predicted_peak=752,
                parts=(
                    (TierPart.ARENA, 512),
                    (TierPart.ACTIVATIONS, 160),
                    (TierPart.RESIDENTS, 80),
                    (TierPart.RESERVE, 0),
                ),
            ),
            TierPlan(
                tier=Tier.HOST,
                capacity=2048,
                predicted_peak=1040,
                parts=((TierPart.STAGING, 800), (TierPart.HOMES, 240)),
            ),
            TierPlan(tier=Tier.NVME, capacity=None, predicted_peak=1600, parts=((TierPart.HOMES, 1600),)),
        ),
    )


def make_swapping_plan() -> Plan:
    """Return the small plan with an offloaded activation of 24 bytes, reloaded to offsets after the bound values."""
    plan = make_small_plan()
    swap = make_swap("gelu_1", Tier.HOST, 24, out=2, gone=5, issue=9, need_by=10, release=11, offset=488)
    device, host, nvme = plan.tiers
    host = replace(host, predicted_peak=1064, parts=(*host.parts, (TierPart.SWAPPED, 24)))
    return with_transfers(plan, swaps=(swap,), tiers=(device, host, nvme))


def make_layered_plan(num_layers: int, *, ticks_per_layer: int = 20, num_slots: int = 3) -> Plan:
    """Return a training plan of a transformer-like model that streams its layers from disk through ``num_slots``."""
    weights = {"attn.qkv.weight": 24 * MIB, "attn.out.weight": 8 * MIB, "mlp.up.weight": 32 * MIB}
    weights["mlp.down.weight"] = 32 * MIB
    layer_nbytes = sum(weights.values())
    num_forward = num_layers * ticks_per_layer + 10
    num_ticks = 3 * num_forward
    placements = [_make_placement("embed.weight", Tier.DEVICE, Tier.NVME, 96 * MIB, master=192 * MIB)]
    for layer in range(num_layers):
        placements.append(_make_placement(f"layers.{layer}.norm.weight", Tier.DEVICE, Tier.HOST, 4096, master=8192))
        home = Tier.HOST if layer < num_layers // 4 else Tier.NVME
        placements += (
            _make_placement(f"layers.{layer}.{name}", home, Tier.NVME, nbytes, master=2 * nbytes)
            for name, nbytes in weights.items()
        )
    placements.append(_make_placement("norm.weight", Tier.DEVICE, Tier.HOST, 4096, master=8192))
    placements.append(_make_placement("rotary.table", Tier.DEVICE, Tier.HOST, MIB, trainable=False))

    region = num_slots * layer_nbytes  # the bound values begin here
    transfers, bound, sinks, spans = [], [], [], []
    dtypes = {item.parameter: item.compute_dtype for item in placements}
    uses = {item.parameter: [0] if item.compute is Tier.DEVICE else [] for item in placements}
    spans.append(_make_span("embed", Phase.FORWARD, 0, 5, 0.01, 400 * MIB))
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        is_forward = phase is Phase.FORWARD
        begin = 5 if is_forward else num_forward + 10
        length = ticks_per_layer if is_forward else 2 * ticks_per_layer
        if not is_forward:
            spans.append(_make_span("loss", phase, num_forward, begin, 0.01, 900 * MIB))
        for index in range(num_layers):
            layer = index if is_forward else num_layers - 1 - index
            start = begin + index * length
            saved = (layer + 1) * 16 * MIB
            spans.append(_make_span(f"layers.{layer}", phase, start, start + length, length * 1e-3, saved + 200 * MIB))
            bound += [
                _make_bound(f"linear_{start}", region, 64 * MIB, start, start + length),
                _make_bound(f"gelu_{start}", region + 64 * MIB, 32 * MIB, start + 1, start + 3),
            ]
            offset = index % num_slots * layer_nbytes
            offsets: list[int] = []
            for name, nbytes in weights.items():
                offsets.append(offset + sum(list(weights.values())[: len(offsets)]))
                uses[f"layers.{layer}.{name}"] += [start, start + length - 1]
                if not is_forward:
                    sinks.append(
                        make_sink(f"layers.{layer}.{name}", start + length - 1, Tier.NVME, nbytes, end=num_ticks)
                    )
            if not is_forward:
                sinks.append(
                    make_sink(f"layers.{layer}.norm.weight", start + length - 1, Tier.HOST, 4096, end=num_ticks)
                )
            transfers.append(
                Transfer(
                    what=Moved.PARAMETERS,
                    name=f"layers.{layer}",
                    destination=Tier.DEVICE,
                    source=Tier.HOST if layer < num_layers // 4 else Tier.NVME,
                    parameters=tuple(f"layers.{layer}.{name}" for name in weights),
                    offsets=tuple(offsets),
                    nbytes=layer_nbytes,
                    issue=begin + max(0, index - num_slots + 1) * length,
                    need_by=start,
                    release=start + length,
                )
            )
        if is_forward:
            spans.append(_make_span("loss", phase, spans[-1].end, num_forward, 0.01, 900 * MIB))
    spans.append(_make_span("embed", Phase.BACKWARD, spans[-1].end, num_ticks, 0.01, 300 * MIB))
    sinks.append(make_sink("norm.weight", num_forward, Tier.HOST, 4096, end=num_ticks))
    sinks.append(make_sink("embed.weight", num_ticks - 1, Tier.NVME, 96 * MIB, end=num_ticks))

    def held(tier: Tier) -> int:
        return sum(placement.nbytes_on(tier) for placement in placements)

    arena = region + 96 * MIB
    on_nvme = held(Tier.NVME)
    return Plan(
        version=PLAN_VERSION,
        name=f"layered-{num_layers}",
        compute_dtype="bfloat16",
        hardware=_make_hardware("workstation", disk=6e9, memory=40e9, elements=1.5e9),
        schedule=Schedule.of_one_graph(num_forward, num_ticks),
        placements=tuple(placements),
        uses=tuple(
            UseFact(parameter=name, dtype=dtypes[name], ticks=tuple(ticks)) for name, ticks in sorted(uses.items())
        ),
        transfers=order_transfers(
            (
                *sorted(transfers, key=lambda transfer: transfer.need_by),
                *sorted(sinks, key=lambda sink: sink.issue),
            )
        ),
        bound=tuple(sorted(bound, key=lambda value: value.live.start)),
        spans=tuple(spans),
        activations=ActivationPlan(
            policy=ActivationPolicy.SAVE,
            saved_nbytes=num_layers * 16 * MIB,
            peak_nbytes=900 * MIB,
            peak_tick=num_forward,
        ),
        arena_nbytes=arena,
        prefetch_nbytes=num_slots * layer_nbytes,
        step=StepPlan(
            timing=StepTiming.SYNCHRONOUS,
            chunk_elements=MIB,
            num_chunks=-(-on_nvme // (12 * MIB)),
            staging_nbytes=192 * MIB,
            nbytes_read=on_nvme,
            nbytes_written=on_nvme - num_layers * layer_nbytes,
            num_elements=num_layers * layer_nbytes // 2,
        ),
        tiers=(
            TierPlan(
                tier=Tier.DEVICE,
                capacity=2048 * MIB,
                predicted_peak=arena + 900 * MIB + held(Tier.DEVICE),
                parts=(
                    (TierPart.ARENA, arena),
                    (TierPart.ACTIVATIONS, 900 * MIB),
                    (TierPart.RESIDENTS, held(Tier.DEVICE)),
                ),
            ),
            TierPlan(
                tier=Tier.HOST,
                capacity=4096 * MIB,
                predicted_peak=192 * MIB + held(Tier.HOST),
                parts=((TierPart.STAGING, 192 * MIB), (TierPart.HOMES, held(Tier.HOST))),
            ),
            TierPlan(tier=Tier.NVME, capacity=None, predicted_peak=on_nvme, parts=((TierPart.HOMES, on_nvme),)),
        ),
    )


@pytest.fixture(scope="session")
def small_plan() -> Plan:
    """Return the plan of two layers."""
    return make_small_plan()


@pytest.fixture(scope="session")
def swapping_plan() -> Plan:
    """Return the plan of two layers with an offloaded activation."""
    return make_swapping_plan()


@pytest.fixture(scope="session")
def layered_plan() -> Plan:
    """Return the plan of 24 layers."""
    return make_layered_plan(24)


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    """Return the function that makes plans of any number of layers."""
    return make_layered_plan


def make_report(
    plan: Plan, *, model: str = "Net", measured_peak: int = 3072, fallbacks: tuple[str, ...] = ()
) -> Report:
    """Return a report on one plan, with a measured peak of the device."""
    return Report(
        model=model,
        plans=(PlanView(plan),),
        step_plans=(PlanView(plan),),
        tiers=(
            TierReport(tier=Tier.DEVICE, capacity=8192, predicted_peak=4096, measured_peak=measured_peak),
            TierReport(tier=Tier.NVME, capacity=None, predicted_peak=0, measured_peak=0),
        ),
        phases=(PhaseReport(phase=Phase.FORWARD, predicted_seconds=0.2, measured_seconds=0.3, count=4),),
        step=StepReport(predicted_seconds=1.0, measured_seconds=0.9, count=3),
        moved=(),
        stalls=(),
        graph_breaks=(),
        replanned=(),
        num_eager_gathers=0,
        fallbacks=fallbacks,
    )
