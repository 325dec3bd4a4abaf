"""Finds implausible entries of a hardware profile: wrong units or signs, rates above their peak, routes to nowhere."""

from collections.abc import Iterator

from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Hardware, route_name
from zinf_compile.ir.records import GAP

# Bounds for any machine of these decades, with a wide margin: outside them a unit is missing or doubled.
_FLOPS = (1e8, 1e17)
_BANDWIDTH = (1e6, 1e15)  # a slow disk over a network; a wafer's memory
_ELEMENTS = (1e4, 1e14)
_LATENCY = (0.0, 1.0)
_TIER_NBYTES = (2**20, 2**60)
_DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_MOST_DEVICES = 10**6


def find_problems(hardware: Hardware) -> Iterator[str]:
    """Yield the problems of a profile, one sentence each; fields that are a ``GAP`` are skipped."""
    if hardware.name == "":
        yield "name is empty; say which machine it is"
    yield from _flops_problems(hardware)
    yield from _outside("memory_bytes_per_second", hardware.memory_bytes_per_second, _BANDWIDTH, "'900 GB/s'")
    yield from _outside(
        "optimizer_elements_per_second", hardware.optimizer_elements_per_second, _ELEMENTS, "'1.5 G elements/s'"
    )
    for index, rate in enumerate(hardware.op_rates if hardware.op_rates is not GAP else ()):
        if rate is not GAP:
            yield from _outside(f"op_rates[{index}].bytes_per_second", rate.bytes_per_second, _BANDWIDTH, "'20 GB/s'")
    yield from _outside("op_overhead_seconds", hardware.op_overhead_seconds, _LATENCY, "'5 us'")
    for name in ("updates_take_of_compute", "links_take_of_compute"):
        share = getattr(hardware, name)
        if share is not GAP and not 0 <= share <= 1:
            yield f"{name} = {share} is not between 0 and 1; it is a share of compute"
    if hardware.unified is True and hardware.integrated is True:
        yield "unified and integrated are both true; say which: a CPU computes in the host's memory, a GPU beside it"
    yield from _tier_problems(hardware)
    yield from _route_problems(hardware)
    yield from _link_problems(hardware)


def _outside(path: str, value: object, limits: tuple[float, float], example: str) -> Iterator[str]:
    if not isinstance(value, int | float):
        return
    low, high = limits
    if value < 0:
        yield f"{path} = {value:g} is negative"
    elif value == 0 and low > 0:
        yield f"{path} is 0; write what the machine has, such as {example}"
    elif not low <= value <= high:
        yield f"{path} = {value:g} is not between {low:g} and {high:g}; write it with its unit, such as {example}"


def _flops_problems(hardware: Hardware) -> Iterator[str]:
    peaks: dict[object, float] = {}
    for field, rates in (
        ("peak_flops", hardware.peak_flops),
        ("flops", hardware.flops),
        ("attention_flops", hardware.attention_flops),
    ):
        if rates is GAP:
            continue
        if not rates and field == "flops":
            yield "flops is empty; give at least the rate of float32"
        seen = set()
        for index, rate in enumerate(rates):
            if rate is GAP:
                continue
            if rate.name is not GAP and rate.name not in _DTYPES:
                yield f"{field}[{index}].name = {rate.name!r} is no dtype; use {', '.join(_DTYPES)}"
            if rate.name in seen:
                yield f"{field} gives {rate.name} twice"
            seen.add(rate.name)
            yield from _outside(f"{field}[{index}].per_second", rate.per_second, _FLOPS, "'70 TFLOP/s'")
            if rate.per_second is GAP:
                continue
            if field == "peak_flops":
                peaks[rate.name] = rate.per_second
            elif rate.per_second > peaks.get(rate.name, rate.per_second):
                yield (
                    f"{field}[{index}].per_second = {rate.per_second:g} of {rate.name} is over its peak of "
                    f"{peaks[rate.name]:g}; nothing achieves more than the peak"
                )


def _tier_problems(hardware: Hardware) -> Iterator[str]:
    if hardware.tiers is GAP:
        return
    seen = set()
    for index, size in enumerate(hardware.tiers):
        if size is GAP:
            continue
        if size.tier in seen:
            yield f"tiers gives {size.tier} twice"
        seen.add(size.tier)
        yield from _outside(f"tiers[{index}].nbytes", size.nbytes, _TIER_NBYTES, "'32 GiB'")
    for tier in (Tier.DEVICE, Tier.HOST) if seen else ():
        if tier not in seen:
            yield f"tiers lacks {tier}; give the size of each, or no sizes at all"


def _route_problems(hardware: Hardware) -> Iterator[str]:
    if hardware.routes is GAP:
        return
    known = {route_name(source, destination) for source in Tier for destination in Tier}
    names: list[str] = []
    for index, route in enumerate(hardware.routes):
        if route is GAP:
            continue
        path = f"routes[{index}]"
        if route.name is not GAP:
            if route.name not in known:
                yield f"{path}.name = {route.name!r} is no route between {', '.join(Tier)}; write 'nvme -> device'"
            if route.name in names:
                yield f"routes gives {route.name!r} twice"
            names.append(route.name)
        yield from _outside(f"{path}.bytes_per_second", route.bytes_per_second, _BANDWIDTH, "'12 GB/s'")
        yield from _outside(f"{path}.latency_seconds", route.latency_seconds, _LATENCY, "'5 us'")
        if route.takes_of_compute is not GAP and not 0 <= route.takes_of_compute <= 1:
            yield f"{path}.takes_of_compute = {route.takes_of_compute} is not between 0 and 1; it is a share of compute"
        if route.lanes == ():
            yield f'{path}.lanes is empty; name what it takes, such as ["pcie in"]'
    has_disk = any(Tier.NVME in name.split() for name in names)
    if hardware.tiers is not GAP:
        has_disk |= any(size is not GAP and size.tier is Tier.NVME for size in hardware.tiers)
    tiers = [tier for tier in Tier if has_disk or tier is not Tier.NVME]
    for source in tiers:
        for destination in tiers:
            if source is not destination and route_name(source, destination) not in names:
                yield f"routes lacks '{route_name(source, destination)}'; bytes move that way"


def _link_problems(hardware: Hardware) -> Iterator[str]:
    for count_name, count, link_name, link in (
        (
            "devices_per_node",
            hardware.devices_per_node,
            "device_link_bytes_per_second",
            hardware.device_link_bytes_per_second,
        ),
        ("num_nodes", hardware.num_nodes, "node_link_bytes_per_second", hardware.node_link_bytes_per_second),
    ):
        if count is not GAP and not 1 <= count <= _MOST_DEVICES:
            yield f"{count_name} = {count} is not between 1 and {_MOST_DEVICES}"
        elif link == 0 and count is not GAP and count > 1:
            yield f"{link_name} is 0, and {count_name} is {count}; say how fast they are tied, such as '70 GB/s'"
        elif link != 0:
            yield from _outside(link_name, link, _BANDWIDTH, "'70 GB/s'")
    if hardware.routes is GAP or hardware.device_link_lanes is GAP:
        return
    known = {lane for route in hardware.routes if route is not GAP and route.lanes is not GAP for lane in route.lanes}
    for lane in hardware.device_link_lanes:
        if lane is not GAP and lane not in known:
            yield f"device_link_lanes names {lane!r}, which no route takes; name lanes of routes, or leave it out"
