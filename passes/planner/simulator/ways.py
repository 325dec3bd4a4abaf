"""The way of each transfer of a plan: which routes and links it takes, given when its updates run."""

from zinf_compile.hardware.world import Leg, World
from zinf_compile.ir.glossary import StepTiming, Tier
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.transfers import Moved, Transfer


class Ways:
    """The legs of the transfers of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.world = World(hardware=plan.hardware, num_ranks=plan.num_ranks)
        self.resident = {use.parameter for use in plan.uses} - plan.by_tick.gathered
        self._taken = set[str]()  # gradients that updates inside backward take on their way home
        if plan.step.timing is StepTiming.IN_BACKWARD:
            self._taken = {item.parameter for item in plan.placements if item.update_nbytes_written}

    def legs(self, transfer: Transfer) -> tuple[Leg, ...]:
        """Return the legs of a transfer, in order; () where nothing moves."""
        if transfer.what is not Moved.GRADIENT:
            return self.world.legs(transfer)
        home = Tier.DEVICE if transfer.name in self._taken else transfer.destination
        return self.world.gradient_legs(home, transfer.nbytes, is_resident=transfer.name in self.resident)
