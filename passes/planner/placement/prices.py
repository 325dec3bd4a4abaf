"""Prices of homes: the seconds of transfers per step that a byte saves in host memory instead of on nvme."""

from dataclasses import dataclass

from zinf_compile.ir.copies import Role
from zinf_compile.ir.glossary import StepTiming, Tier
from zinf_compile.ir.hardware import Hardware

ROLES = (Role.COMPUTE, Role.GRADIENT, Role.MASTER, Role.STATE)  # of equal prices, the first one goes first
COMPUTE, MASTER, STATE = (ROLES.index(role) for role in (Role.COMPUTE, Role.MASTER, Role.STATE))
# The weight of transfers that forward and backward hide behind compute, relative to those that nothing hides.
_HIDDEN = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class HomePrices:
    """Seconds per byte and step; only ratios matter. ``gather`` is for one gather, the others are for a whole step."""

    gather: float
    gradient: float
    master: float
    state: float

    def of_step(self, role: Role) -> float:
        """Return the price of the bytes of a role that the optimizer step moves."""
        return {Role.GRADIENT: self.gradient, Role.MASTER: self.master, Role.STATE: self.state}[role]


# Before rates are known. Per byte and step a compute copy is read twice and written once, a gradient is written in
# backward and read by the step, master copies and optimizer state are read and written once by the step.
USUAL_PRICES = HomePrices(gather=2.0, gradient=3.0, master=2.0, state=1.0)


def price_homes(hardware: Hardware, timing: StepTiming, *, are_transfers_hidden: bool) -> HomePrices:
    """Return the prices on a machine; lower for gathers and gradients if forward and backward hide them.

    Without nvme there is nothing to choose, and the usual prices are returned.
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
        state=read + write,
    )
