"""Plans a captured graph, to run on this machine or offline for another. Its parameters come from a ``Catalog``.

A graph that runs and one that is captured over fake tensors go through the same steps. For several ranks, rank 0 makes
each plan, from a request that is the same on all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from zinf_compile.driver.catalog import Catalog, Narrowing
from zinf_compile.hardware.observed import Observed
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.ir.errors import CapacityError
from zinf_compile.ir.facts import GraphFacts, ParameterFact, at_sizes
from zinf_compile.ir.glossary import ActivationPolicy, Tier
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.plan import Placement, Plan
from zinf_compile.ir.sizes import Size
from zinf_compile.ir.tiles import WHOLE, TiledParameters, join_placements
from zinf_compile.passes.capture.splits import Form, Splitter, other_forms
from zinf_compile.passes.planner.cost.costs import RESIDENT_THRESHOLD
from zinf_compile.passes.planner.memory.policies import allowed_policies
from zinf_compile.passes.planner.search.planner import Request, Searches, make_plan
from zinf_compile.passes.planner.search.remake import Remade, remake_plan
from zinf_compile.passes.planner.search.verify import verify_plan
from zinf_compile.passes.planner.simulator.simulate import simulate
from zinf_compile.runtime.process.interrupts import interruptible
from zinf_compile.runtime.ranks.agreement import check_record_alike
from zinf_compile.runtime.ranks.ranks import ALONE, Ranks

_WAITING = (
    "Activations may leave the device one at a time, and compute waits for them: nothing fits otherwise. With more "
    "device_memory it would not wait."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The chosen form of a graph, and its plan."""

    form: Form
    planned: PlanView
    forms: tuple[Form, ...]  # all that were compared
    op_by_op: str | None = None  # why it has no segments although they were asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    form: Form
    planned: PlanView | None  # None: it does not fit, or was not planned by itself


class GraphPlanner:
    """Plans one captured graph over the parameters of a catalog."""

    def __init__(
        self,
        name: str,
        catalog: Catalog,
        hardware: Hardware,
        *,
        tiled: TiledParameters = WHOLE,
        notes: tuple[str, ...] = (),
        kernel_cache_nbytes: int = 0,
        open_nbytes: int = 0,
        num_open: int = 0,
        num_ranks: int = 1,
        num_replicas: int = 1,
        num_tensor_ranks: int = 1,
        ranks: Ranks = ALONE,
        every_policy: bool = False,
        policy: ActivationPolicy | None = None,
        waits_for_activations: bool = False,
    ) -> None:
        """``open_nbytes`` are the device bytes that open forwards hold, not counting the graph's inputs.

        Beside these, ``num_open`` forwards hold what this graph saves.

        ``ranks`` are those that plan together, all of which call the same methods. A plan made in one process may be for
        many ranks too.

        With ``every_policy``, forms that cannot be faster are kept too, because they may be needed for what-if
        questions about other budgets. With a ``policy`` there is no other. ``notes`` are added to the notes of every plan.
        ``waits_for_activations`` is what it is in a ``Request``.
        """
        self._waits_for_activations = waits_for_activations
        self._policy = policy
        self.name = name
        self.hardware = hardware
        self.open_nbytes = open_nbytes
        self.tiled = tiled
        self._catalog = catalog
        self._notes = notes
        self._kernel_cache_nbytes = kernel_cache_nbytes
        self._num_ranks, self._num_replicas, self._num_tensor_ranks = num_ranks, num_replicas, num_tensor_ranks
        self._num_open = num_open
        self._ranks = ranks
        self._every_policy = every_policy

    def choose(self, graph: Splitter, reads: Mapping[int, torch.dtype], *, searches: Searches | None = None) -> Chosen:
        """Return the op-by-op form whose plan has the shortest step. Torch's min-cut choice is tried first.

        ``reads`` are the parameters that the graph casts at every read, with the dtype. ``searches`` are those that were
        made for the graph already. Raises CapacityError if no form fits.
        """
        searches = searches or Searches()
        alone = None
        if self._every_policy:
            forms = self._every_form(graph, reads)
        else:
            first, *others = self._policies(graph)
            saving = self._choose_dtypes(graph, first, reads, searches)
            plan = None if saving.planned is None else saving.planned.plan
            forms = (saving.form, *other_forms(graph, saving.form, others, self.hardware, plan))
            alone = saving.planned if len(forms) == 1 else None
        planned = alone or self.plan_for([form.facts for form in forms], searches=searches)
        best = next(form for form in forms if form.facts.policy is planned.activations.policy)
        return Chosen(form=best, planned=planned, forms=forms)

    def plan_as_it_is(
        self, graph: Splitter, reads: Mapping[int, torch.dtype], *, searches: Searches | None = None
    ) -> Plan:
        """Return the best op-by-op plan with the copies that parameters have now. Raises CapacityError if none fits."""
        return self.plan_for(self._splits_as_they_are(graph, reads), searches=searches).plan

    def request_as_it_is(self, graph: Splitter) -> Request:
        """Return the request that ``plan_as_it_is`` plans."""
        return self.request_for(self._splits_as_they_are(graph, {}))

    def request_for_all(self, graph: Splitter) -> Request:
        """Return the request that ``choose`` plans with ``every_policy``."""
        return self.request_for([form.facts for form in self._every_form(graph, {})])

    def _every_form(self, graph: Splitter, reads: Mapping[int, torch.dtype]) -> tuple[Form, ...]:
        first, *others = self._policies(graph)
        saving = graph.split(first, narrowed=self._catalog.narrow_copies(reads))
        return (saving, *other_forms(graph, saving, others, self.hardware, None))

    def _splits_as_they_are(self, graph: Splitter, reads: Mapping[int, torch.dtype]) -> list[GraphFacts[Size]]:
        narrowed = self._catalog.narrow_copies(reads)
        # Only the fastest policy and the one that needs the fewest bytes: the search for tiles plans many times.
        policies = [each for each in self._policies(graph) if not each.is_by_value]
        return [graph.split(policy, narrowed=narrowed).facts for policy in policies]

    def compute_in_segments(self, graph: Splitter, ops: Chosen) -> Chosen:
        """Return the form of ``ops`` with compiled blocks; ``ops`` itself, with the reason, if that does not fit.

        A segment holds all parameters that it reads, and all of their gradients, at the same time. So a segment reads
        at most one tile. If whole blocks do not fit, it also reads at most one large parameter.
        """
        tiles = {item.parameter for item in ops.planned.placements if item.tile_of is not None}
        large = {item.parameter for item in ops.planned.placements if item.compute_nbytes > RESIDENT_THRESHOLD}
        reason = None
        for apart in (tiles, large):
            form = graph.segment(ops.form, apart)
            try:
                planned = self.plan_for([form.facts])
            except CapacityError as error:
                reason = f"in segments it does not fit: {error}"
                continue
            forms: tuple[Form, ...] = (form,)
            if self._every_policy:
                forms = tuple(form if each is ops.form else graph.segment(each, apart) for each in ops.forms)
                planned = PlanView(planned.plan, self.request_for([each.facts for each in forms]))
            return Chosen(form=form, planned=planned, forms=forms)
        return replace(ops, op_by_op=reason)

    def plan_for(
        self,
        candidates: Sequence[GraphFacts[Size]],
        *,
        captured: GraphFacts[Size] | None = None,
        narrowing: Narrowing | None = None,
        searches: Searches | None = None,
    ) -> PlanView:
        """Return the best plan for the candidates, verified. Raises CapacityError if none fits.

        ``captured`` are the facts with symbolic sizes, if ``candidates`` are already at some sizes. ``searches`` are those
        that may be reused. All ranks return the plan of rank 0, or raise its error. RankError if their requests differ.
        """
        request = self.request_for(candidates, captured=captured)
        if narrowing is not None:
            placements = narrowing.placements if self._catalog.has_plans else None
            request = self._with_homes(request, narrowing.parameters, placements)

        def make() -> Plan:
            with interruptible():  # safe: planning changes no state
                return self.with_notes(make_plan(request, searches))

        if not self._ranks.is_alone:
            check_record_alike(self._ranks, f"requests for a plan of {self.name}", _without_own(request))
        plan = self._ranks.do_on_first(f"planning {self.name}", make)
        verify_plan(plan)
        return PlanView(plan, request)

    def remake(self, plan: Plan, request: Request, observed: Observed) -> Remade:
        """Return the plan to continue with by the rates that were observed, verified: on all ranks that of rank 0."""

        def make() -> Remade:
            with interruptible():  # safe: planning changes no state
                remade = remake_plan(plan, request, observed)
                return replace(remade, request=replace(remade.request, captured=()))  # its symbols cannot be pickled

        if not self._ranks.is_alone:
            check_record_alike(self._ranks, f"requests for a plan of {self.name}", _without_own(request))
        remade = self._ranks.do_on_first(f"planning {self.name} by measured times", make)
        verify_plan(remade.plan)
        return replace(remade, request=replace(request, hardware=remade.request.hardware))

    def request_for(
        self, candidates: Sequence[GraphFacts[Size]], *, captured: GraphFacts[Size] | None = None
    ) -> Request:
        """Return the request for a plan of the candidates."""
        catalog = self._catalog
        request = Request(
            name=self.name,
            candidates=tuple(at_sizes(candidate) for candidate in candidates),
            captured=tuple(candidates) if captured is None else (captured,),
            parameters=(),
            config=catalog.config,
            hardware=self.hardware,
            num_ranks=self._num_ranks,
            num_replicas=self._num_replicas,
            kernel_cache_nbytes=self._kernel_cache_nbytes,
            open_nbytes=self.open_nbytes,
            num_open=self._num_open,
            num_tensor_ranks=self._num_tensor_ranks,
            waits_for_activations=self._waits_for_activations,
        )
        return self._with_homes(request, catalog.facts, catalog.placements if catalog.has_plans else None)

    def with_notes(self, plan: Plan) -> Plan:
        """Return the plan with the notes about the graph and its model added."""
        waiting = (_WAITING,) if self._waits_for_activations and plan.swaps else ()
        return replace(plan, notes=(*plan.notes, *waiting, *self._notes, *self._catalog.notes))

    def _policies(self, graph: Splitter) -> tuple[ActivationPolicy, ...]:
        if self._policy is not None and graph.has_backward:
            return (self._policy,)
        return allowed_policies(self._catalog.config.recompute) if graph.has_backward else (ActivationPolicy.SAVE,)

    def _choose_dtypes(
        self, graph: Splitter, policy: ActivationPolicy, reads: Mapping[int, torch.dtype], searches: Searches
    ) -> _Candidate:
        """Return the form in which gathers move narrower copies of parameters that the graph casts.

        Existing narrow copies are used. New ones are planned for streamed parameters if they make the step faster.
        """
        catalog = self._catalog
        own = self._try(graph, policy, catalog.narrow_copies(reads), searches)
        placements = join_placements(own.planned.placements) if own.planned is not None else catalog.placements
        streamed = {item.parameter for item in placements if item.compute is not Tier.DEVICE}
        narrowing = catalog.plan_narrowing(reads, streamed)
        if narrowing is None:
            return own
        narrower = self._try(graph, policy, narrowing.dtypes, searches, narrowing)
        if own.planned is not None and (
            narrower.planned is None
            or simulate(narrower.planned.plan).step_seconds > simulate(own.planned.plan).step_seconds
        ):
            return own
        catalog.adopt_narrowing(narrowing)
        return narrower

    def _try(
        self,
        graph: Splitter,
        policy: ActivationPolicy,
        narrowed: Mapping[int, torch.dtype],
        searches: Searches,
        narrowing: Narrowing | None = None,
    ) -> _Candidate:
        form = graph.split(policy, narrowed=narrowed)
        planned = None
        with suppress(CapacityError):
            planned = self.plan_for([form.facts], narrowing=narrowing, searches=searches)
        return _Candidate(form=form, planned=planned)

    def _with_homes(
        self, request: Request, parameters: Iterable[ParameterFact], placements: Iterable[Placement] | None
    ) -> Request:
        """Return the request with these parameters of the model, tiled ones replaced by their tiles.

        Homes are planned anew if several ranks have all rows of something that this graph reads in tiles: rows of a tile
        are not consecutive there. The parameters move, and the other graphs are planned again for their new homes.
        """
        cut = None if placements is None else self.tiled.cut_placements(placements)
        tiles = () if cut is None or self._num_ranks == 1 else (item for item in cut if item.tile_of is not None)
        if any(tile.is_whole(role) for tile in tiles for role in tile.by_role):
            cut = None
        return replace(request, parameters=self.tiled.cut_facts(parameters), placements=cut)


def _without_own(request: Request) -> Request:
    """Return a request without what each rank has of its own, and what plans are not made from."""
    config = replace(request.config, nvme=None if request.config.nvme is None else ".", device="")
    return replace(request, config=config, captured=())
