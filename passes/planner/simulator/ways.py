"""The way of each transfer of a plan: which routes and links it takes, given when its updates run."""

from functools import cached_property

from zinf_compile.hardware.world import Leg, World
from zinf_compile.ir.glossary import StepTiming, Tier
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.transfers import Moved, Transfer


class Ways:
    """The legs of the transfers of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.world = World.of_plan(plan)
        self.resident = {use.parameter for use in plan.uses} - plan.by_tick.gathered
        self.updated_residents = [  # every rank has them whole and updates its rows
            placement
            for placement in plan.placements
            if plan.num_ranks > 1 and placement.compute is Tier.DEVICE and placement.gradient_nbytes
        ]
        self._taken = set[str]()  # gradients that updates inside backward take on their way home
        if plan.step.timing is StepTiming.IN_BACKWARD:
            self._taken = {item.parameter for item in plan.placements if item.update_nbytes_written}

    @property
    def num_reducing_legs(self) -> int:
        """Return how many of the first legs of a gradient reduce it: among the ranks of a replica, and between replicas."""
        return (self.world.num_ranks > 1) + (self.world.num_replicas > 1)

    @cached_property
    def spread(self) -> tuple[Leg, ...]:
        """Return the way on which ranks get the rows of residents that others have updated; () where there are none."""
        nbytes = sum(placement.compute_nbytes for placement in self.updated_residents)
        return (Leg(self.world.links, nbytes),) if nbytes else ()

    def legs(self, transfer: Transfer) -> tuple[Leg, ...]:
        """Return the legs of a transfer, in order; () where nothing moves."""
        if transfer.what is not Moved.GRADIENT:
            return self.world.legs(transfer)
        home = Tier.DEVICE if transfer.name in self._taken else transfer.destination
        return self.world.gradient_legs(home, transfer.nbytes, is_resident=False)  # ``spread`` brings updates back
