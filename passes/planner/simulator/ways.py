"""The way of each transfer of a plan: which routes and links it takes, given when its updates run."""

from functools import cached_property

from zinf_compile.hardware.world import Leg, World
from zinf_compile.ir.glossary import StepTiming, Tier
from zinf_compile.ir.plan import SPREAD_NBYTES, Plan
from zinf_compile.ir.transfers import Moved, Transfer


class Ways:
    """The legs of the transfers of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.world = World.of_plan(plan)
        self._uses = plan.uses
        self._legs: dict[int, tuple[Leg, ...]] = {}  # by id of the transfers, which the plan keeps alive
        self._transfers = plan.transfers
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
    def spread(self) -> tuple[tuple[int, Leg], ...]:
        """Return the legs on which ranks get the rows of residents that others have updated, in the order of first reads.

        Each comes with the tick of the first read of what it brings.
        """
        first = {use.parameter: use.ticks[0] for use in reversed(self._uses)}
        sizes = sorted((first.get(each.parameter, 0), each.compute_nbytes) for each in self.updated_residents)
        legs: list[tuple[int, Leg]] = []
        tick, nbytes = 0, 0
        for read, size in sizes:
            tick, nbytes = read if nbytes == 0 else tick, nbytes + size
            if nbytes >= SPREAD_NBYTES:
                legs.append((tick, Leg(self.world.links, nbytes)))
                nbytes = 0
        return (*legs, (tick, Leg(self.world.links, nbytes))) if nbytes else tuple(legs)

    def legs(self, transfer: Transfer) -> tuple[Leg, ...]:
        """Return the legs of a transfer of the plan, in order; () where nothing moves."""
        legs = self._legs.get(id(transfer))
        if legs is None:
            self._legs[id(transfer)] = legs = self._find_legs(transfer)
        return legs

    def _find_legs(self, transfer: Transfer) -> tuple[Leg, ...]:
        if transfer.what is not Moved.GRADIENT:
            return self.world.legs(transfer)
        home = Tier.DEVICE if transfer.name in self._taken else transfer.destination
        return self.world.gradient_legs(
            home, transfer.moved_nbytes, is_resident=False
        )  # ``spread`` brings updates back
