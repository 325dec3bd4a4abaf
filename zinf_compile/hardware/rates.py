"""Replaces single rates of a hardware profile, for what-if plans."""

import difflib
from collections.abc import Mapping
from dataclasses import replace

from zinf_compile.hardware.profile_io import read_quantity
from zinf_compile.ir.copies import Code
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Hardware, Rate, Route, TierSize, route_name

_ROUTES: Mapping[str, tuple[str, ...]] = {
    "nvme_read": (route_name(Tier.NVME, Tier.HOST), route_name(Tier.NVME, Tier.DEVICE)),
    "nvme_write": (route_name(Tier.HOST, Tier.NVME), route_name(Tier.DEVICE, Tier.NVME)),
    "host_to_device": (route_name(Tier.HOST, Tier.DEVICE),),
    "device_to_host": (route_name(Tier.DEVICE, Tier.HOST),),
}
_TIERS: Mapping[str, Tier] = {f"{tier}_memory": tier for tier in Tier}
_NUMBERS: Mapping[str, str] = {
    "optimizer": "optimizer_elements_per_second",
    "device_link": "device_link_bytes_per_second",
    "node_link": "node_link_bytes_per_second",
}
_SLOWER: Mapping[Code, float] = {Code.BFLOAT16: 1.5, Code.INT8: 2.0}  # an update of AdamW, measured on CPUs with AVX2
_COUNTS = ("devices_per_node", "num_nodes")
RATE_NAMES = tuple(sorted({*_ROUTES, *_TIERS, *_NUMBERS, *_COUNTS, "flops", "memory_bandwidth"}))


def with_rates(hardware: Hardware, **rates: float | str) -> Hardware:
    """Return a copy of ``hardware`` with rates replaced, by the names in ``RATE_NAMES``.

    A rate is a number (bytes, bytes per second, FLOP/s, elements per second) or text such as ``"7 GB/s"``. ``flops`` is
    the achievable rate of the fastest dtype, ``memory_bandwidth`` the device's; rates derived from them scale with
    them. Transfers between disk and device are never faster than the link between host and device. ConfigError for an
    unknown name, with the nearest one; for a rate the hardware does not have; and for one that is not above 0.
    """
    for name in rates:
        if name not in RATE_NAMES:
            near = difflib.get_close_matches(name, RATE_NAMES, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known rates: {', '.join(RATE_NAMES)}"
            raise ConfigError(f"unknown rate {name!r}; {hint}")
    for name, given in rates.items():
        hardware = _replace_one(hardware, name, given)
    return _behind_the_link(hardware) if rates.keys() & _ROUTES.keys() else hardware


def assume_coded_states(hardware: Hardware, code: Code) -> Hardware:
    """Return the hardware with the rate of updates whose two moments are stored in codes, if nobody has measured it."""
    rate = hardware.optimizer_elements_per_second / _SLOWER[code]
    return replace(hardware, optimizer_elements_per_second=rate)


def _replace_one(hardware: Hardware, name: str, given: float | str) -> Hardware:
    if name in _ROUTES:
        return _with_routes(hardware, name, _read(name, given, "bytes_per_second"))
    if name in _TIERS:
        return _with_tier(hardware, _TIERS[name], int(_read(name, given, "nbytes")))
    if name in _COUNTS:
        if type(given) is not int or given < 1:
            raise ConfigError(f"{name}={given!r} is no count; give a whole number, 1 or more")
        return replace(hardware, **{name: given})  # type: ignore[arg-type]  # both counts are ints
    if name in _NUMBERS:
        field = _NUMBERS[name]
        return replace(hardware, **{field: _read(name, given, field)})  # type: ignore[arg-type]  # all are floats
    if name == "flops":
        factor = _read(name, given, "per_second") / max(rate.per_second for rate in hardware.flops)
        return replace(
            hardware,
            flops=_scaled(hardware.flops, factor),
            attention_flops=_scaled(hardware.attention_flops, factor),
            peak_flops=_scaled(hardware.peak_flops, factor),
        )
    return replace(hardware, memory_bytes_per_second=_read(name, given, "memory_bytes_per_second"))


def _read(name: str, given: float | str, field: str) -> float:
    """Return a given rate as a number in the unit of its field."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise ConfigError(f"{name}={given!r} is not a rate; give a number or a string such as '7 GB/s'")
    if isinstance(given, str):
        try:
            given = read_quantity(field, given)
        except ValueError as error:
            raise ConfigError(f"{name}={given!r} is not {error}") from error
    if not 0 < given < float("inf"):
        raise ConfigError(f"{name}={given!r} is not above 0; give what the machine would have")
    return float(given)


def _with_routes(hardware: Hardware, name: str, rate: float) -> Hardware:
    if not any(route.name in _ROUTES[name] for route in hardware.routes):
        raise ConfigError(f"{name} cannot be replaced: {hardware.name} has no route '{_ROUTES[name][0]}'")
    return replace(
        hardware,
        routes=tuple(
            replace(route, bytes_per_second=rate) if route.name in _ROUTES[name] else route for route in hardware.routes
        ),
    )


def _behind_the_link(hardware: Hardware) -> Hardware:
    """Return the hardware with routes between disk and device at most as fast as those between host and device."""
    rates = {route.name: route.bytes_per_second for route in hardware.routes}

    def bounded(route: Route) -> Route:
        name = route.name.replace(Tier.NVME, Tier.HOST)
        if Tier.DEVICE not in route.name.split() or name not in rates:
            return route
        return replace(route, bytes_per_second=min(route.bytes_per_second, rates[name]))

    return replace(hardware, routes=tuple(map(bounded, hardware.routes)))


def _with_tier(hardware: Hardware, tier: Tier, nbytes: int) -> Hardware:
    sizes = {size.tier: size for size in hardware.tiers} | {tier: TierSize(tier=tier, nbytes=nbytes)}
    return replace(hardware, tiers=tuple(sizes[each] for each in Tier if each in sizes))


def _scaled(rates: tuple[Rate, ...], factor: float) -> tuple[Rate, ...]:
    return tuple(replace(rate, per_second=rate.per_second * factor) for rate in rates)
