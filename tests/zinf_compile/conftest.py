"""Plans made by hand: a small one whose timeline can be computed in the head, and one of as many layers as wanted."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from zinf_compile.facts import UseFact
from zinf_compile.hardware import Hardware, Rate, make_route
from zinf_compile.plans import (
    PLAN_VERSION,
    SWAPPED_PART,
    ActivationPlan,
    ActivationSwap,
    BoundValue,
    ComputeSpan,
    GatherTransfer,
    GradientSink,
    Placement,
    Plan,
    StepPlan,
    TierPlan,
)
from zinf_compile.terms import ActivationPolicy, LiveRange, Phase, StepTiming, Tier

MIB = 2**20


def _make_hardware(name: str, *, disk: float, memory: float, elements: float) -> Hardware:
    return Hardware(
        name=name,
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
    return Placement(
        parameter=parameter,
        compute=compute,
        master=rest if master else compute,
        gradient=rest,
        optimizer_state=rest,
        compute_dtype="bfloat16" if master else "float32",
        compute_nbytes=nbytes,
        master_nbytes=master,
        gradient_nbytes=nbytes if trainable else 0,
        gradient_dtype=("bfloat16" if master else "float32") if trainable else None,
        optimizer_state_nbytes=2 * (master or nbytes) if trainable else 0,
    )


def _make_transfer(name: str, phase: Phase, offset: int, issue: int, need_by: int, release: int) -> GatherTransfer:
    return GatherTransfer(
        name=name,
        phase=phase,
        source=Tier.NVME,
        parameters=(f"{name}.weight",),
        offsets=(offset,),
        offset=offset,
        nbytes=200,
        issue=issue,
        need_by=need_by,
        release=release,
    )


def _make_bound(name: str, offset: int, nbytes: int, start: int, end: int) -> BoundValue:
    return BoundValue(name=name, offset=offset, nbytes=nbytes, live=LiveRange(start=start, end=end))


def _make_span(module: str, phase: Phase, start: int, end: int, seconds: float, peak_nbytes: int) -> ComputeSpan:
    return ComputeSpan(module=module, phase=phase, start=start, end=end, seconds=seconds, peak_nbytes=peak_nbytes)


def _make_sink(parameter: str, tick: int, destination: Tier, nbytes: int) -> GradientSink:
    return GradientSink(parameter=parameter, tick=tick, destination=destination, nbytes=nbytes)


def make_small_plan() -> Plan:
    """Return a plan of an embedding and two layers: one second a tick, the disk reads 100 and writes 50 bytes/s."""
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    return Plan(
        version=PLAN_VERSION,
        name="small",
        compute_dtype=None,
        hardware=_make_hardware("paper", disk=100.0, memory=1000.0, elements=10.0),
        num_forward_ticks=6,
        num_ticks=12,
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
            _make_transfer("layers.0", forward, 0, 0, 1, 3),
            _make_transfer("layers.1", forward, 256, 1, 3, 5),
            _make_transfer("layers.1", backward, 256, 6, 7, 9),
            _make_transfer("layers.0", backward, 0, 7, 9, 11),
        ),
        bound=(
            _make_bound("linear", 456, 32, 1, 3),
            _make_bound("gelu", 488, 24, 2, 4),
            _make_bound("linear_1", 456, 40, 4, 6),
            _make_bound("mm", 456, 56, 7, 9),
            _make_bound("mm_1", 456, 32, 9, 10),
        ),
        swaps=(),
        sinks=(
            _make_sink("layers.1.weight", 8, Tier.NVME, 200),
            _make_sink("layers.0.weight", 10, Tier.NVME, 200),
            _make_sink("embed.weight", 11, Tier.HOST, 64),
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
                parts=(("arena", 512), ("activations", 160), ("residents", 80), ("reserve", 0)),
            ),
            TierPlan(tier=Tier.HOST, capacity=2048, predicted_peak=1040, parts=(("staging", 800), ("homes", 240))),
            TierPlan(tier=Tier.NVME, capacity=None, predicted_peak=1600, parts=(("homes", 1600),)),
        ),
    )


def make_swapping_plan() -> Plan:
    """Return the small plan with 24 bytes that rest on the host in between, behind those that compute writes."""
    plan = make_small_plan()
    swap = ActivationSwap(
        value="gelu_1",
        destination=Tier.HOST,
        nbytes=24,
        out=2,
        gone=5,
        issue=9,
        need_by=10,
        release=11,
        offset=488,
    )
    device, host, nvme = plan.tiers
    host = replace(host, predicted_peak=1064, parts=(*host.parts, (SWAPPED_PART, 24)))
    return replace(plan, swaps=(swap,), tiers=(device, host, nvme))


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

    region = num_slots * layer_nbytes  # where the bound values begin
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
                    sinks.append(_make_sink(f"layers.{layer}.{name}", start + length - 1, Tier.NVME, nbytes))
            if not is_forward:
                sinks.append(_make_sink(f"layers.{layer}.norm.weight", start + length - 1, Tier.HOST, 4096))
            transfers.append(
                GatherTransfer(
                    name=f"layers.{layer}",
                    phase=phase,
                    source=Tier.HOST if layer < num_layers // 4 else Tier.NVME,
                    parameters=tuple(f"layers.{layer}.{name}" for name in weights),
                    offsets=tuple(offsets),
                    offset=offset,
                    nbytes=layer_nbytes,
                    issue=begin + max(0, index - num_slots + 1) * length,
                    need_by=start,
                    release=start + length,
                )
            )
        if is_forward:
            spans.append(_make_span("loss", phase, spans[-1].end, num_forward, 0.01, 900 * MIB))
    spans.append(_make_span("embed", Phase.BACKWARD, spans[-1].end, num_ticks, 0.01, 300 * MIB))
    sinks.append(_make_sink("norm.weight", num_forward, Tier.HOST, 4096))
    sinks.append(_make_sink("embed.weight", num_ticks - 1, Tier.NVME, 96 * MIB))

    def held(tier: Tier) -> int:
        return sum(placement.nbytes_on(tier) for placement in placements)

    arena = region + 96 * MIB
    on_nvme = held(Tier.NVME)
    return Plan(
        version=PLAN_VERSION,
        name=f"layered-{num_layers}",
        compute_dtype="bfloat16",
        hardware=_make_hardware("workstation", disk=6e9, memory=40e9, elements=1.5e9),
        num_forward_ticks=num_forward,
        num_ticks=num_ticks,
        placements=tuple(placements),
        uses=tuple(
            UseFact(parameter=name, dtype=dtypes[name], ticks=tuple(ticks)) for name, ticks in sorted(uses.items())
        ),
        transfers=tuple(sorted(transfers, key=lambda transfer: (transfer.issue, transfer.need_by))),
        bound=tuple(sorted(bound, key=lambda value: value.live.start)),
        swaps=(),
        sinks=tuple(sorted(sinks, key=lambda sink: sink.tick)),
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
                parts=(("arena", arena), ("activations", 900 * MIB), ("residents", held(Tier.DEVICE))),
            ),
            TierPlan(
                tier=Tier.HOST,
                capacity=4096 * MIB,
                predicted_peak=192 * MIB + held(Tier.HOST),
                parts=(("staging", 192 * MIB), ("homes", held(Tier.HOST))),
            ),
            TierPlan(tier=Tier.NVME, capacity=None, predicted_peak=on_nvme, parts=(("homes", on_nvme),)),
        ),
    )


@pytest.fixture(scope="session")
def small_plan() -> Plan:
    """Return the plan of two layers."""
    return make_small_plan()


@pytest.fixture(scope="session")
def swapping_plan() -> Plan:
    """Return the plan of two layers with an activation that leaves the device."""
    return make_swapping_plan()


@pytest.fixture(scope="session")
def layered_plan() -> Plan:
    """Return the plan of 24 layers."""
    return make_layered_plan(24)


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    """Return the function that makes plans of any number of layers."""
    return make_layered_plan
