"""Rates adjusted to what steps measured, computed by hand."""

import pytest

from zinf_compile.hardware.observed import BusyTime, Observed, RouteBytes, with_observed
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Hardware, OpKind, OpRate, Rate, make_route

MB = 10**6
PAIRS = [(source, target) for source in Tier for target in Tier if source is not target]
READ, WRITE = "nvme -> device", "host -> nvme"


def machine(*, is_duplex: bool) -> Hardware:
    """Return a machine whose disk reads 100 MB/s and writes 50."""
    return Hardware(
        name="paper",
        unified=True,
        flops=(Rate(name="float32", per_second=1e12),),
        attention_flops=(Rate(name="float32", per_second=1e11),),
        peak_flops=(Rate(name="float32", per_second=2e12),),
        op_rates=(OpRate(kind=OpKind.RANDOM, dtype="float32", bytes_per_second=1e9),),
        op_overhead_seconds=1e-6,
        memory_bytes_per_second=1e10,
        routes=tuple(
            make_route(*pair, (50 if pair[1] is Tier.NVME else 100) * MB, is_duplex=is_duplex) for pair in PAIRS
        ),
        optimizer_elements_per_second=1e9,
    )


def observed(**changes: object) -> Observed:
    """Return observed steps that read 400 MB and wrote 100: 2 s of reads only, 3 s of both, 5 s of writes only."""
    fields: dict[str, object] = {
        "num_steps": 3,
        "compute_seconds": 1.0,
        "step_seconds": 1.0,
        "moved": (RouteBytes(READ, 400 * MB), RouteBytes(WRITE, 100 * MB)),
        "busy": (BusyTime((READ,), 2.0), BusyTime((WRITE, READ), 3.0), BusyTime((WRITE,), 5.0)),
    }
    return Observed(**{**fields, **changes})  # type: ignore[arg-type]


def rates(hardware: Hardware) -> dict[str, float]:
    return {route.name: route.bytes_per_second / MB for route in hardware.routes}


def test_what_takes_turns_on_a_disk_is_slowed_down_alike() -> None:
    found = rates(with_observed(machine(is_duplex=False), observed(), compute_factor=1.0))
    # 4 s of reads and 2 s of writes were expected, and the disk was busy for 10 s.
    assert found["nvme -> device"] == found["nvme -> host"] == pytest.approx(60)
    assert found["host -> nvme"] == found["device -> nvme"] == pytest.approx(30)
    assert found["host -> device"] == found["device -> host"] == 100


def test_a_disk_that_reads_and_writes_at_once_has_two_rates() -> None:
    found = rates(with_observed(machine(is_duplex=True), observed(), compute_factor=1.0))
    assert found["nvme -> device"] == found["nvme -> host"] == pytest.approx(80)  # 400 MB in 5 s
    assert found["host -> nvme"] == found["device -> nvme"] == pytest.approx(12.5)  # 100 MB in 8 s


def test_of_little_nothing_is_learnt() -> None:
    hardware = machine(is_duplex=False)
    few = observed(moved=(RouteBytes(READ, 4 * MB), RouteBytes(WRITE, MB)))
    assert with_observed(hardware, few, compute_factor=1.0).routes == hardware.routes


def test_all_that_ops_take_is_as_many_times_as_long() -> None:
    hardware = with_observed(machine(is_duplex=False), observed(), compute_factor=4.0)
    assert hardware.flops_per_second("float32") == 0.25e12
    assert hardware.attention_flops_per_second("float32") == 0.25e11
    assert hardware.op_bytes_per_second(OpKind.RANDOM, "float32") == 0.25e9
    assert hardware.op_bytes_per_second(OpKind.ELEMENTWISE, "float32") == 0.25e10
    assert hardware.op_overhead_seconds == 4e-6
    assert hardware.peak_flops == ()
    assert hardware.optimizer_elements_per_second == 1e9
    assert hardware.sources == ("the first steps of a model",)
