"""The parameters of a store, shared by all graphs of a session: homes, copies, numbers and promised peaks."""

from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from zinf_compile.driver.catalog import Narrowing
from zinf_compile.ir.config import Config
from zinf_compile.ir.copies import Encoding, Granularity, StateSpec
from zinf_compile.ir.errors import CapacityError, StoreError
from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.glossary import Tier, dtype_name, format_bytes
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.plan import Placement, Plan, TierPart
from zinf_compile.ir.slices import Slice
from zinf_compile.ir.tiles import TiledParameters, rows_of_rank, tile_name
from zinf_compile.passes.planner.placement.budgets import check_budgets
from zinf_compile.passes.planner.placement.homes import place_narrowed, place_states, plan_placement
from zinf_compile.runtime.model.moving import move_homes
from zinf_compile.runtime.params.numbers import find_record
from zinf_compile.runtime.params.records import StoredParameter
from zinf_compile.runtime.process.reserve import ProcessReserve
from zinf_compile.runtime.storage.slots import Slot, torch_dtype
from zinf_compile.runtime.store.store import Store

_PADDED = 8  # one part in so many is added to staging for whole tensors: sectors, and gradients on their way home
_LEAST_GROWTH = 16  # planning again for state that grows by less than one part in so many is not worth its seconds


class Assumed(NamedTuple):
    """What plans are made for: the facts of all parameters, and their homes."""

    facts: Mapping[str, ParameterFact]
    placements: tuple[Placement, ...]
    more_staging: int


class StoreCatalog:
    """What the graphs of a session share: the store, the planned homes, and the newest plan of each graph."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.notes: list[str] = []  # sentences added to the notes of every plan
        if store.config.integrated:
            self.notes.append(
                "device and host are one RAM: what is in host memory is read and updated in place, and what still moves "
                "between the two tiers is copied within it"
            )
        self.placements: tuple[Placement, ...] = ()  # of every parameter, by the newest plan
        self.plans: dict[str, Plan] = {}  # of the compiled graphs, by name
        self.promised: dict[Tier, int] = {}  # the highest peak of all plans, including replaced ones
        self.hardware: Hardware | None = None  # set by the first graph, updated by measured steps
        self._most_states = 0  # the bytes for which ``look_at_states`` returned some last
        self._seen: tuple[int, ...] = ()  # the number of states and bytes at home when it last looked
        # Until the process is measured, reserve_memory is what the model keeps on the device outside of the store.
        kept = store.config.reserve_memory if store.config.measures_reserve else 0
        self.process = ProcessReserve(store.held, kept_nbytes=kept)

    @property
    def config(self) -> Config:
        """Return the options of the model, with the current reserve."""
        return self.store.config

    @config.setter
    def config(self, config: Config) -> None:
        self.store.config = config

    @property
    def facts(self) -> tuple[ParameterFact, ...]:
        """Return the facts of every parameter adopted so far, in module order."""
        return tuple(self.store.facts.values())

    @property
    def has_plans(self) -> bool:
        """Return whether homes are fixed, because a graph compiled earlier has chosen them."""
        return bool(self.plans)

    @property
    def num_ranks(self) -> int:
        """Return how many ranks divide every parameter among them."""
        return self.store.ranks.size

    def fact_of(self, param: int) -> ParameterFact:
        """Return the fact of a parameter by its number in graphs."""
        return self.store.facts[find_record(param).name]

    def number_of(self, param: int, number: int, tiles: Sequence[Slice]) -> int:
        """Return the number by which ops refer to one of the tiles of a parameter."""
        mine = rows_of_rank(tiles, number, self.store.ranks.rank, self.num_ranks)
        return self.store.tile(find_record(param).whole, number, tiles[number], mine).param

    def numbers(self, tiled: TiledParameters) -> dict[str, int]:
        """Return the numbers by which ops refer to parameters and tiles, by their names in plans."""
        numbers = {name: record.param for name, record in self.store.records.items()}
        for name, tiles in tiled.tiles.items():
            for number in range(len(tiles)):
                numbers[tile_name(name, number)] = self.number_of(self.store.records[name].param, number, tiles)
        return numbers

    def narrow_copies(self, reads: Mapping[int, torch.dtype]) -> dict[int, torch.dtype]:
        """Return those of ``reads`` whose parameter has a compute copy of the dtype that the graph casts it to."""
        facts = {param: self.store.facts[find_record(param).whole.name] for param in reads}
        return {
            param: dtype
            for param, dtype in reads.items()
            if facts[param].narrowed and torch_dtype(facts[param].compute_dtype) == dtype
        }

    def plan_narrowing(self, reads: Mapping[int, torch.dtype], streamed: Container[str]) -> Narrowing | None:
        """Return narrower copies, in the dtype that a graph casts to, for streamed parameters that have only one copy.

        None if there is no such parameter, or if budgets or the disk have no room. In that case adds a note.
        """
        asked = {param: self.store.facts[find_record(param).whole.name] for param in reads}
        fresh = {
            fact.name: fact.narrowed_to(dtype_name(reads[param]))
            for param, fact in asked.items()
            if fact.compute_dtype == fact.dtype
            and fact.name in streamed
            and (fact.trainable or fact.unified)
            and fact.compute.columns is None
        }
        if not fresh:
            return None
        facts, ranks = tuple(fresh.get(fact.name, fact) for fact in self.facts), self.store.ranks.size
        try:
            if self.has_plans:
                placements = place_narrowed(facts, self.placements, self.config, num_ranks=ranks)
            else:
                placements = plan_placement(facts, self.config, num_ranks=ranks)
            check_budgets(facts, placements, self.config)
            self.store.ranks.do_alike(
                "reserving room for narrower copies", lambda: self.store.reserve_growth(placements)
            )
        except (CapacityError, StoreError) as error:
            self.store.ranks.check_together()  # a rank may be gone, which is no lack of room
            nbytes = format_bytes(sum(fact.compute_nbytes for fact in fresh.values()))
            self.notes.append(
                f"{len(fresh)} parameters that are only read through a cast move in their own dtype, and are cast on the "
                f"device: there is no room for {nbytes} of narrower copies ({error})"
            )
            return None
        new = {param: reads[param] for param, fact in asked.items() if fact.name in fresh}
        return Narrowing(dtypes=self.narrow_copies(reads) | new, parameters=facts, placements=placements)

    def adopt_narrowing(self, narrowing: Narrowing) -> None:
        """Adopt the planned copies. ``settle`` creates them."""
        self.store.facts.update({fact.name: fact for fact in narrowing.parameters})
        self.placements = narrowing.placements

    def find_states(self) -> dict[str, ParameterFact]:
        """Return the facts of the parameters of which an optimizer keeps more or fewer bytes than was assumed, by name."""
        found = {}
        for name, record in self.store.records.items():
            fact = self.store.facts[name]
            if not fact.trainable or record.update.count == 0:
                continue
            kept = replace(
                fact, states=tuple(_state_spec(slot, record) for slot in record.copies.updated_states.values())
            )
            if kept.state_nbytes != fact.state_nbytes:
                found[name] = kept
        return found

    def find_smaller_states(self) -> dict[str, ParameterFact]:
        """Return the facts of those of which an optimizer keeps fewer bytes."""
        found = self.find_states()
        return {name: fact for name, fact in found.items() if fact.state_nbytes < self.store.facts[name].state_nbytes}

    def look_at_states(self) -> dict[str, ParameterFact]:
        """Return ``find_states`` if that is more in all than was assumed, and something has changed since the last call."""
        num_states = sum(len(record.copies.updated_states) for record in self.store.records.values())
        # Of several ranks each has other bytes, and all have to look at the same time.
        at_home = [self.store.held.nbytes_on(tier) for tier in Tier] if self.store.ranks.is_alone else []
        seen = (self.store.meter.num_steps > 0, num_states, *at_home)
        if seen == self._seen:
            return {}
        self._seen = seen
        found = self.find_states()
        assumed = sum(fact.optimizer_state_nbytes for fact in self.facts)
        now = assumed + sum(fact.state_nbytes - self.store.facts[name].state_nbytes for name, fact in found.items())
        if now <= max(assumed, self._most_states + self._most_states // _LEAST_GROWTH):
            return {}
        self._most_states = now
        return found

    def look_again(self) -> None:
        """Let ``look_at_states`` return again what it has returned last."""
        self._seen, self._most_states = (), 0

    def adopt_states(self, found: Mapping[str, ParameterFact]) -> "Assumed":
        """Plan from now on for what optimizers keep of some parameters; return what was assumed before.

        ``settle`` moves what has to. CapacityError, with nothing changed, if there is no room for it.
        """
        before = Assumed(dict(self.store.facts), self.placements, self.config.more_staging)
        if found:
            facts = tuple(found.get(fact.name, fact) for fact in self.facts)
            self.config, self.placements = self._place_states(facts)
            self.store.facts.update(found)
        return before

    def _place_states(self, facts: Sequence[ParameterFact]) -> tuple[Config, tuple[Placement, ...]]:
        """Return the homes of all parameters with the states of their facts, and the options with staging for these.

        Staging holds two of the largest that are updated whole, if that is possible: one is updated while the next comes
        from nvme. Else disk and processors take turns.
        """
        place = partial(place_states, facts, self.placements, num_ranks=self.num_ranks)
        whole = max((fact.nbytes_updated_whole for fact in facts), default=0)
        room = 2 * whole + whole // _PADDED
        larger = self.config.with_staging_for(room) if self.store.ranks.is_alone else self.config
        try:
            placed = place(self.config)
            if not any(item.has_whole_state and item.nbytes_on(Tier.NVME) for item in placed):
                return self.config, placed
        except CapacityError:
            if larger == self.config:
                raise
            return larger, place(larger)
        with suppress(CapacityError):
            return larger, place(larger)
        return self.config, placed

    def go_back_to(self, before: "Assumed") -> None:
        """Plan from now on for what was assumed before."""
        self.store.facts.update(before.facts)
        self.placements = before.placements
        self.config = replace(self.config, more_staging=before.more_staging)

    def settle(self) -> None:
        """Move parameters to their homes by the newest plan. Called before a graph runs, never while one is traced."""
        if self.placements != tuple(self.store.placements.values()):
            with self.store.staging.uncounted():
                move_homes(self.store, self.placements)
            self.placements = tuple(self.store.placements.values())  # something may no longer be in place
        self.store.staging.capacity = max(self.config.staging_memory, 0)  # homes have left what it has now in addition

    def promise(self, plan: Plan) -> None:
        """Limit the device tier to the largest peak of all plans, including this one, and record promised peaks."""
        if plan.name in self.plans:
            self.plans[plan.name] = plan
        plans = [plan, *self.plans.values()]
        largest = max((each.tier(Tier.DEVICE) for each in plans), key=lambda tier: tier.predicted_peak)
        reserve, workspace = largest.nbytes_of(TierPart.RESERVE), largest.nbytes_of(TierPart.WORKSPACE)
        self.store.ram.promise(largest.predicted_peak - reserve, workspace)  # the reserve is not allocated by the tier
        has_room = all(each.has_room_for_updates for each in plans)
        self.store.updates.may_allocate = has_room or not self.config.memory.unified
        self.store.transfers.link.leaving_limit = min(each.leaving_nbytes for each in plans)
        for tier in plan.tiers:
            self.promised[tier.tier] = max(self.promised.get(tier.tier, 0), tier.predicted_peak)

    def look_at_process(self) -> None:
        """Measure what the process takes besides the model, if budgets include it. Called before a forward."""
        self.reserve(self.process.look(self.config))

    def reserve(self, nbytes: int) -> None:
        """Reserve these bytes of the device budget for the process. Plans with another reserve are replanned.

        Of several ranks the one that takes most counts.
        """
        (nbytes,) = self.store.ranks.largest("the memory of the process", nbytes)
        if nbytes != self.config.reserve_memory:
            self.config = replace(self.config, reserve_memory=nbytes)
            self.store.ram.budget = self.config.device_memory - nbytes


def _state_spec(slot: Slot, record: StoredParameter) -> StateSpec:
    """Return what an optimizer keeps in a slot."""
    shape = record.shape if slot.per_element else slot.tensor.shape
    return StateSpec(
        name=str(slot.key.state),
        shape=tuple(shape),
        encoding=Encoding(dtype=dtype_name(slot.dtype), code=slot.code),
        granularity=Granularity.ELEMENT if slot.per_element else Granularity.MATRIX,
    )
