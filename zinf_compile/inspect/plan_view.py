"""``zinf_compile.Plan``: a plan beside what it was made from. It prints, saves, draws and answers questions.

The plan itself, ``.plan``, is a value that knows nothing of files or views. What is read most of it can be read here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zinf_compile.inspect.chrome_trace import save_chrome_trace
from zinf_compile.inspect.explain import explain
from zinf_compile.inspect.html.page import save_html_page
from zinf_compile.inspect.memory_viz import save_memory_viz
from zinf_compile.inspect.printing import dump_plan
from zinf_compile.inspect.purchases import Purchase, rank_purchases
from zinf_compile.inspect.what_if import change_request, largest_batch, smallest_device_memory, tokens_to_hide_disk
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.facts import UseFact
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.pipeline import PipelinePlan, PipelineSchedule
from zinf_compile.ir.plan import (
    ActivationPlan,
    BoundValue,
    ComputeSpan,
    Placement,
    Plan,
    StepPlan,
    TierPlan,
)
from zinf_compile.ir.plan_io import load_plan, save_plan
from zinf_compile.ir.schedule import Schedule
from zinf_compile.ir.transfers import Swap, Transfer
from zinf_compile.passes.planner.search.planner import Request, make_plan


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan, and the request that it was made from. Equal to another view if the plans are equal."""

    plan: Plan
    request: Request | None = field(default=None, compare=False, repr=False)  # None: the plan was read from a file

    @staticmethod
    def load(path: str | Path) -> "PlanView":
        """Return the plan saved at ``path``; PlanFileError if it is damaged or of another version."""
        return PlanView(load_plan(path))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, with its version."""
        save_plan(self.plan, path)

    def __str__(self) -> str:
        return dump_plan(self.plan)

    def what_if(self, **changes: object) -> "PlanView":
        """Return the plan as it would be with other input sizes, budgets, options or rates, all by name.

        ``batch=8`` (any symbol of the capture), ``device_memory="16GiB"``, ``nvme_read="7GB/s"`` and so on. Parameters
        and activations find new homes. ConfigError for an unknown name, CapacityError for what does not fit.
        """
        changed = change_request(self._request_to_ask(), changes)
        return PlanView(make_plan(changed), changed)

    def max_batch(self) -> int:
        """Return the largest batch that fits; 0 if none. UnsupportedError where the capture has a fixed batch."""
        return largest_batch(self._request_to_ask())

    def min_device_memory(self) -> int:
        """Return the bytes of the smallest device budget, in whole pages of 4 KiB, with which a plan can be made."""
        return smallest_device_memory(self._request_to_ask())

    def tokens_to_hide_disk(self) -> int | None:
        """Return the fewest tokens per step of a rank with which compute waits for the disk at most 2 % of the step.

        Tokens are the batch times the sequence length, if the capture has one. Found to within a sixteenth, by planning a
        dozen batches. None if it waits longer with the largest batch that fits. UnsupportedError where the capture has a
        fixed batch: plan with ``dynamic=True``.
        """
        return tokens_to_hide_disk(self._request_to_ask())

    def what_to_buy(self, prices: Mapping[str, float] | None = None) -> tuple[Purchase, ...]:
        """Return what would shorten the step, with the seconds saved: twice the memory, a second disk, a faster device.

        ``prices`` may have ``ram`` and ``device_memory``, per GiB, and ``disk``, ``device`` and ``link``, each for one more
        or for one of twice the rate, in any money. What saves the most per price comes first. All is counted for one rank.
        ConfigError for a price list that cannot be used.
        """
        return rank_purchases(self.plan, self._request_to_ask(), prices or {})

    def explain(self, name: str) -> str:
        """Return where a parameter or a value lives, when it moves, what that costs, and what another home would."""
        return explain(self.plan, self._request_to_ask(), name)

    def to_html(self, path: str | Path) -> None:
        """Write one page that works without a network: memory of each tier, the timeline, what bounds the step, values."""
        save_html_page(self.plan, path)

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write the predicted timeline as a Chrome trace: lanes for compute and each route, counters for each tier."""
        save_chrome_trace(self.plan, path)

    def to_memory_viz(self, path: str | Path) -> None:
        """Write the planned device memory over a step as a memory snapshot of PyTorch's, for pytorch.org/memory_viz."""
        save_memory_viz(self.plan, path)

    def _request_to_ask(self) -> Request:
        """Return what the plan was made from.

        ConfigError for one that was loaded, since a file has the plan alone, and for one micro-batch of a longer step.
        """
        if self.plan.pipeline is not None:
            what = "one micro-batch of one stage"
            if self.plan.pipeline.schedule is PipelineSchedule.ROUNDS:
                what = "the stages of one rank"
            raise ConfigError(
                f"the plan of {self.name} is of {what}, which does not answer for the whole step; "
                "plan again with other numbers, and compare plan.pipeline.step_seconds"
            )
        if self.request is None:
            raise ConfigError(
                f"the plan of {self.name} was read from a file, which has the plan and not what it was made from; make "
                "it again, with zinf_compile.plan, and ask that one"
            )
        return self.request

    @property
    def name(self) -> str:
        """Return the name of the graph that it is for."""
        return self.plan.name

    @property
    def compute_dtype(self) -> str | None:
        """Return the dtype of forward and backward; None: each parameter's own."""
        return self.plan.compute_dtype

    @property
    def hardware(self) -> Hardware:
        """Return the hardware that it was made for, with the rates that it predicts by."""
        return self.plan.hardware

    @property
    def num_ranks(self) -> int:
        """Return how many ranks divide the model among them."""
        return self.plan.num_ranks

    @property
    def num_replicas(self) -> int:
        """Return how many replicas of these ranks train together and add up their gradients."""
        return self.plan.num_replicas

    @property
    def num_tensor_ranks(self) -> int:
        """Return how many tensor-parallel ranks divide the weights of each layer."""
        return self.plan.num_tensor_ranks

    @property
    def pipeline(self) -> PipelinePlan | None:
        """Return the step of all stages and micro-batches; None if the plan is that of the whole step."""
        return self.plan.pipeline

    @property
    def tiers(self) -> tuple[TierPlan, ...]:
        """Return each tier's budget and promised peak, in bytes."""
        return self.plan.tiers

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Return where each parameter lives, in module order."""
        return self.plan.placements

    @property
    def schedule(self) -> Schedule:
        """Return in which order its phases run, and their ticks."""
        return self.plan.schedule

    @property
    def num_ticks(self) -> int:
        """Return the ticks of forward and backward together."""
        return self.plan.num_ticks

    @property
    def uses(self) -> tuple[UseFact, ...]:
        """Return which parameters the graph reads at which ticks."""
        return self.plan.uses

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Return everything that moves in forward and backward, in the order in which it is issued."""
        return self.plan.transfers

    @property
    def gathers(self) -> tuple[Transfer, ...]:
        """Return the transfers of parameters to the device."""
        return self.plan.gathers

    @property
    def swaps(self) -> tuple[Swap, ...]:
        """Return the activations that are offloaded in forward, with the transfers both ways."""
        return self.plan.swaps

    @property
    def sinks(self) -> tuple[Transfer, ...]:
        """Return the transfers of gradients to their homes."""
        return self.plan.sinks

    @property
    def bound(self) -> tuple[BoundValue, ...]:
        """Return the values that ops write to fixed bytes of the arena."""
        return self.plan.bound

    @property
    def spans(self) -> tuple[ComputeSpan, ...]:
        """Return the runs of ops, with their estimated seconds."""
        return self.plan.spans

    @property
    def activations(self) -> ActivationPlan:
        """Return what the activations that backward needs cost."""
        return self.plan.activations

    @property
    def step(self) -> StepPlan:
        """Return the plan of the optimizer step."""
        return self.plan.step

    @property
    def arena_nbytes(self) -> int:
        """Return the bytes of the arena."""
        return self.plan.arena_nbytes

    @property
    def prefetch_nbytes(self) -> int:
        """Return how many bytes transfers may run ahead of compute."""
        return self.plan.prefetch_nbytes

    @property
    def notes(self) -> tuple[str, ...]:
        """Return sentences on how it was made."""
        return self.plan.notes

    def tier(self, tier: Tier) -> TierPlan:
        """Return the plan of one tier."""
        return self.plan.tier(tier)

    def placement(self, parameter: str) -> Placement:
        """Return where one parameter lives; KeyError if the model has no such parameter."""
        return self.plan.placement(parameter)

    def swapped_nbytes(self, tier: Tier) -> int:
        """Return the bytes of activations that rest on a tier between forward and backward."""
        return self.plan.swapped_nbytes(tier)
