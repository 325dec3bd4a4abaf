"""``with_rates`` replaces only the named rates, and rejects invalid ones."""

from dataclasses import replace

import pytest

from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.hardware.rates import RATE_NAMES, with_rates
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import make_route

H200 = load_hardware("h200")


def test_a_faster_disk_is_faster_on_both_its_routes() -> None:
    changed = with_rates(H200, nvme_read="7GB/s")
    assert changed.bytes_per_second(Tier.NVME, Tier.HOST) == 7e9
    assert changed.bytes_per_second(Tier.NVME, Tier.DEVICE) == 7e9
    untouched = [route for route in H200.routes if not route.name.startswith("nvme")]
    assert [route for route in changed.routes if not route.name.startswith("nvme")] == untouched
    assert replace(changed, routes=H200.routes) == H200


def test_a_disk_is_behind_the_link_of_the_device() -> None:
    changed = with_rates(H200, nvme_read="200 GB/s", nvme_write="100 GB/s", host_to_device="60 GB/s")
    assert changed.bytes_per_second(Tier.NVME, Tier.HOST) == 200e9
    assert changed.bytes_per_second(Tier.NVME, Tier.DEVICE) == 60e9
    assert changed.bytes_per_second(Tier.DEVICE, Tier.NVME) == H200.bytes_per_second(Tier.DEVICE, Tier.HOST)


def test_flops_scale_every_dtype_and_the_peaks() -> None:
    changed = with_rates(H200, flops="1400 TFLOP/s")
    assert [rate.per_second for rate in changed.flops] == [2 * rate.per_second for rate in H200.flops]
    assert [rate.per_second for rate in changed.attention_flops] == [
        2 * rate.per_second for rate in H200.attention_flops
    ]
    assert [rate.per_second for rate in changed.peak_flops] == [2 * rate.per_second for rate in H200.peak_flops]


def test_sizes_links_and_counts() -> None:
    changed = with_rates(H200, host_memory="1TB", num_nodes=4, node_link=1e11, optimizer="2 G elements/s")
    sizes = {size.tier: size.nbytes for size in H200.tiers} | {Tier.HOST: 10**12}
    assert {size.tier: size.nbytes for size in changed.tiers} == sizes
    assert (changed.num_nodes, changed.devices_per_node) == (4, H200.devices_per_node)
    assert changed.node_link_bytes_per_second == 1e11
    assert changed.optimizer_elements_per_second == 2e9


def test_every_rate_can_be_replaced() -> None:
    for name in RATE_NAMES:
        assert with_rates(H200, **{name: 3 if name in ("devices_per_node", "num_nodes") else 1.1e9}) != H200, name


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"nvme_raed": "7GB/s"}, "unknown rate 'nvme_raed'; did you mean 'nvme_read'"),
        ({"xyz": 1}, "unknown rate 'xyz'; known rates: .*memory_bandwidth"),
        ({"nvme_read": "7GB"}, "nvme_read='7GB' is not bytes per second, such as '12 GB/s'"),
        ({"nvme_read": 0}, "nvme_read=0 is not above 0"),
        ({"flops": "-3 TFLOP/s"}, "flops=-3000000000000.0 is not above 0"),
        ({"flops": float("nan")}, "flops=nan is not above 0"),
        ({"memory_bandwidth": True}, "memory_bandwidth=True is not a rate"),
        ({"num_nodes": 1.5}, "num_nodes=1.5 is no count"),
        ({"device_memory": "many"}, "device_memory='many' is not a size"),
    ],
)
def test_what_is_no_rate_is_refused(rates: dict[str, float | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_rates(H200, **rates)


def test_a_rate_the_hardware_does_not_have_is_refused() -> None:
    diskless = replace(H200, routes=(make_route(Tier.HOST, Tier.DEVICE, 1e9), make_route(Tier.DEVICE, Tier.HOST, 1e9)))
    with pytest.raises(ConfigError, match="nvme_read cannot be replaced: h200 has no route 'nvme -> host'"):
        with_rates(diskless, nvme_read="7GB/s")
