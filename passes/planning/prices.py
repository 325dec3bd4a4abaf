"""What a byte costs by its home: seconds of transfers per step that it saves in host memory instead of on nvme."""

from dataclasses import dataclass

from zinf_compile.hardware import Hardware
from zinf_compile.terms import StepTiming, Tier

ROLES = ("compute", "gradient", "master", "optimizer_state")
COMPUTE, MASTER = ROLES.index("compute"), ROLES.index("master")
# What forward and backward hide behind compute counts this much beside what nothing hides.
_HIDDEN = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class HomePrices:
    """Seconds per byte and step; only their ratios matter. ``gather`` is of one gather, the rest of a whole step."""

    gather: float
    gradient: float
    master: float
    optimizer_state: float


# Before rates are known: per byte and step a compute copy is read twice and written once, a gradient written and read
# once on the way of backward, a master copy and optimizer state read and written once.
USUAL_PRICES = HomePrices(gather=2.0, gradient=3.0, master=2.0, optimizer_state=1.0)


def price_homes(hardware: Hardware, timing: StepTiming, *, are_transfers_hidden: bool) -> HomePrices:
    """Return the prices on a machine; lower for gathers and gradients if forward and backward hide them.

    Without an nvme there is nothing to choose, and the prices are the usual ones.
    """
    if not any(str(Tier.NVME) in route.name for route in hardware.routes):
        return USUAL_PRICES

    def saved(source: Tier, destination: Tier) -> float:
        near = [tier if tier is not Tier.NVME else Tier.HOST for tier in (source, destination)]
        fast = 0.0 if near[0] is near[1] else 1 / hardware.bytes_per_second(near[0], near[1])
        return max(0.0, 1 / hardware.bytes_per_second(source, destination) - fast)

    read, write = saved(Tier.NVME, Tier.HOST), saved(Tier.HOST, Tier.NVME)
    hidden = _HIDDEN if are_transfers_hidden else 1.0
    never_rests = timing is StepTiming.IN_BACKWARD
    return HomePrices(
        gather=hidden * saved(Tier.NVME, Tier.DEVICE),
        gradient=0.0 if never_rests else hidden * saved(Tier.DEVICE, Tier.NVME) + read,
        master=read + write,
        optimizer_state=read + write,
    )
