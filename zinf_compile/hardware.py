"""Hardware: the rates a prediction is made with. Measured on the machine (``runtime/calibrate.py``) or given."""

from dataclasses import dataclass

from zinf_compile.terms import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A named rate: FLOP/s of a dtype's matrix products, or bytes/s of a route such as ``"nvme -> device"``."""

    name: str
    per_second: float


def route_name(source: Tier, destination: Tier) -> str:
    """Return how a route is written everywhere: ``"nvme -> device"``."""
    return f"{source} -> {destination}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the machine does per second. ``routes`` holds every pair of tiers that bytes move between."""

    name: str
    flops: tuple[Rate, ...]  # by dtype name
    memory_bytes_per_second: float
    routes: tuple[Rate, ...]
    optimizer_elements_per_second: float

    def flops_per_second(self, dtype: str) -> float:
        """Return the matrix-product rate of a dtype; of the slowest known dtype for one that was not measured."""
        rates = {rate.name: rate.per_second for rate in self.flops}
        return rates.get(dtype, min(rates.values()))

    def bytes_per_second(self, source: Tier, destination: Tier) -> float:
        """Return a route's bandwidth; KeyError for a route the hardware does not have."""
        return {rate.name: rate.per_second for rate in self.routes}[route_name(source, destination)]
