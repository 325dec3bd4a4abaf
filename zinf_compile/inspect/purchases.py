"""What to buy: how much shorter a step is with more memory, a second disk, a faster device or a faster link.

Each is planned by itself, with everything else as it is, so that what a purchase moves elsewhere counts too.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zinf_compile.inspect.what_if import change_request
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Tier, format_bytes
from zinf_compile.ir.hardware import route_name
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.search.planner import Request, make_plan
from zinf_compile.passes.planner.search.search import EQUALLY_FAST
from zinf_compile.passes.planner.simulator.simulate import simulate

_GIB = 2**30
PER_GIB = ("ram", "device_memory")  # priced by the GiB
NAMES = (*PER_GIB, "disk", "device", "link")  # the others by the piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """Something to buy for one rank, and the step with it."""

    name: str  # as in a price list
    what: str
    step_seconds: float
    saved_seconds: float  # of the step; 0 if less than the simulator is accurate to
    price: float | None  # None: the list does not have it

    @property
    def saved_per_price(self) -> float | None:
        """Return the seconds saved for each unit of money; None without a price."""
        return None if self.price is None else self.saved_seconds / self.price


def rank_purchases(plan: Plan, request: Request, prices: Mapping[str, float]) -> tuple[Purchase, ...]:
    """Return what could be bought, the most seconds per price first, then what has no price, by seconds.

    ``request`` is what ``plan`` was made from. ConfigError for a price list with an unknown name, or with a price that is
    not above 0.
    """
    check_prices(prices)
    if request.placements is not None:  # homes that other graphs chose: what is bought may change them, so this may too
        plan = make_plan(change_request(request, {}))
    before = simulate(plan).step_seconds
    found = []
    for name, what, amount, changes in _offers(request):
        step = simulate(make_plan(change_request(request, changes))).step_seconds
        found.append(
            Purchase(
                name=name,
                what=what,
                step_seconds=step,
                saved_seconds=before - step if step * EQUALLY_FAST < before else 0.0,
                price=prices[name] * amount if name in prices else None,
            )
        )
    return tuple(sorted(found, key=lambda each: (each.price is None, -(each.saved_per_price or each.saved_seconds))))


def _offers(request: Request) -> Iterator[tuple[str, str, float, Mapping[str, object]]]:
    """Yield the name of each purchase, what it is, how much of what is priced, and what it changes."""
    config, hardware = request.config, request.hardware
    rates = {route.name: route.bytes_per_second for route in hardware.routes}

    def twice(**routes: tuple[Tier, Tier]) -> dict[str, object]:
        """Return twice the rates of those routes that there are, by the name of the rate."""
        named = {name: route_name(source, destination) for name, (source, destination) in routes.items()}
        return {name: 2 * rates[route] for name, route in named.items() if route in rates}

    ram, device_memory = config.host_memory, config.device_memory
    more, more_on_device = {"host_memory": 2 * ram}, {"device_memory": 2 * device_memory}
    if hardware.unified:  # both budgets are of the same RAM
        nbytes = ram + device_memory
        yield "ram", f"{format_bytes(nbytes)} more RAM", nbytes / _GIB, more | more_on_device
    else:
        yield "ram", f"{format_bytes(ram)} more RAM", ram / _GIB, more
        what = f"{format_bytes(device_memory)} more on the device"
        yield "device_memory", what, device_memory / _GIB, more_on_device
    if config.nvme is not None:
        disk = twice(nvme_read=(Tier.NVME, Tier.HOST), nvme_write=(Tier.HOST, Tier.NVME))
        if config.nvme_memory is not None:
            disk["nvme_memory"] = 2 * config.nvme_memory
        yield "disk", "a second disk beside the first", 1, disk
    flops = max(rate.per_second for rate in hardware.flops)
    faster: dict[str, object] = {"flops": 2 * flops, "memory_bandwidth": 2 * hardware.memory_bytes_per_second}
    if hardware.unified:
        faster["optimizer"] = 2 * hardware.optimizer_elements_per_second
    yield "device", f"a {'processor' if hardware.unified else 'device'} that is twice as fast", 1, faster
    if not hardware.unified:
        link = twice(host_to_device=(Tier.HOST, Tier.DEVICE), device_to_host=(Tier.DEVICE, Tier.HOST))
        yield "link", "a link between host and device that is twice as fast", 1, link


def check_prices(prices: Mapping[str, float]) -> None:
    """Raise ConfigError for a price list with an unknown name, or with a price that is not above 0."""
    for name, price in prices.items():
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(NAMES)}"
            raise ConfigError(f"a price list does not know {name!r}; {hint}")
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < float("inf"):
            raise ConfigError(
                f"the price of {name!r}, {price!r}, is not a number above 0; say what it costs, in any money"
            )
