"""The pass contract: what a pass is, what a property is, and the runner that checks both."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import fx

from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.glossary import ActivationPolicy
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.slices import Slice
from zinf_compile.ir.transfers import Transfer

Inputs = TypeVar("Inputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """A statement about a graph that can be checked. ``check`` raises VerifyError naming the node that breaks it."""

    name: str
    check: Callable[[fx.GraphModule], None] = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass(Generic[Inputs]):
    """``run`` edits the graph in place; it never decides, lints, recompiles or logs."""

    name: str
    run: Callable[[fx.GraphModule, Inputs], None]
    requires: frozenset[Property] = frozenset()
    establishes: frozenset[Property] = frozenset()
    breaks: frozenset[Property] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterHandle:
    """How a graph names one stored parameter: the arguments of its gather."""

    name: str
    param: int
    shape: tuple[int, ...]
    dtype: torch.dtype  # of what the gather gives
    device: torch.device
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareInputs:
    """What PREPARE passes read: the stored parameters behind plain parameter placeholders, by placeholder name."""

    handles: Mapping[str, ParameterHandle]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentHandle:
    """Where in an input of a graph a component of a quantised parameter is, and how the graph gathers it."""

    path: tuple[str, ...]  # of attributes of a tensor that wraps others; empty for the input itself
    of: ParameterHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentInputs:
    """What GATHER_COMPONENTS reads: the components in inputs of a torch-level graph, by placeholder name."""

    handles: Mapping[str, tuple[ComponentHandle, ...]]
    frozen_anchor: str | None  # the placeholder of the anchor, if the graph has it as an input


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundInputs:
    """What WORK_IN_ROUNDS reads: which rank has which parameter, and this one's place among the ranks."""

    owners: Mapping[int, int]  # the rank of each parameter that the graph gathers, by its number
    shared: Container[str]  # placeholders of what every rank has alike, such as anchors and buffers
    own: Container[str]  # placeholders of what only the rank has whose batch it is of: what needs a gradient
    has_grad: bool  # whether the graph is called with gradients enabled
    rank: int
    num_ranks: int
    store_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileHandle:
    """How a graph names a tile of a stored parameter: the number that its gather takes, and which rows (``cut_rows``)."""

    param: int
    rows: Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class TileInputs:
    """What TILE passes read: the tiles of each parameter that is tiled, in order, by the parameter's own number."""

    tiles: Mapping[int, Sequence[TileHandle]] = field(default_factory=dict)
    fuses_losses: bool = False  # fuse linear layers with the cross-entropy of their logits
    recomputes_logits: bool = False  # recompute logits in backward, even if gradients are small
    micro_batches: int = 1  # into which blocks are cut along their samples
    chain_tiles: int = 1  # number of row tiles of MLPs and other chains of layers
    num_ranks: int = 1  # that divide each tile among them


@dataclass(frozen=True, slots=True, kw_only=True)
class JointInputs:
    """What JOINT passes read."""

    added_at_home: Container[int] = frozenset()  # parameters whose gradient contributions are not summed on the device
    divisor: float = 1.0  # of each gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """Ranks that have parts of the same parameters, as a graph names them, and this one's place among them."""

    name: str
    size: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Which saved values each rank of a tensor group keeps a part of, of those that are the same on all of its ranks."""

    groups: Mapping[str, TensorGroup]  # by name
    names: frozenset[str] | None = frozenset()  # of the values; None: all that can be divided
    policy: ActivationPolicy | None = None  # under which ranks have agreed on them; others save other values
    alike: Container[int] = frozenset()  # numbers of parameters that are taken to be the same on all ranks of a group
    are_inputs_alike: bool = False  # whether inputs of the graph are, too


@dataclass(frozen=True, slots=True, kw_only=True)
class FormInputs:
    """What FORM, INFERENCE and SPLIT passes read: one way to compute a graph, of several that are compared."""

    policy: ActivationPolicy
    narrowed: Mapping[int, torch.dtype] = field(
        default_factory=dict
    )  # gathers that move this narrower dtype, by parameter
    recomputed: frozenset[str] = frozenset()  # names of forward ops that backward recomputes
    keeps_collectives: bool = False  # whether backward must not run collectives of the forward again
    division: Division | None = None  # of saved values among tensor-parallel ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInputs:
    """What SEGMENT passes read: the block of each node, and the number under which the runtime knows a segment.

    A segment reads several parameters of ``apart`` only if they are gathered next to each other.
    """

    blocks: Mapping[fx.Node, str]
    apart: Container[int]
    number_of: Callable[[fx.GraphModule], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerInputs:
    """What LOWER passes read: the plan, and the numbers under which the runtime knows names."""

    plan: Plan
    store_id: int
    param_ids: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Our facts about a node, kept under ``node.meta[NODE_FACTS]``."""

    tick: int | None = None  # of a node of the captured graph; None for one that lowering inserted
    parameter: str | None = None  # of a gather or a store_grad
    transfer: Transfer | None = None  # of an issue_gather or an issue_swap_in
    value: str | None = None  # of an input of backward: the saved value that it is, or is a view of


NODE_FACTS = "zinf"
TILE = "zinf_tile"  # in ``node.meta["custom"]``, which AOTAutograd preserves: the number of a node's tile in its chain
JOINED = "zinf_joined"  # in ``node.meta["custom"]``: True for what all micro-batches of a block give, joined
SEGMENT = "zinf_segment"  # of a run_segment: the graph module of what it runs
BLOCK = "zinf_block"  # of a run_segment: the block it is a part of
_NOTHING_KNOWN = NodeFacts()


def node_facts(node: fx.Node) -> NodeFacts:
    """Return our facts about a node; all are None for a node without any."""
    facts = node.meta.get(NODE_FACTS, _NOTHING_KNOWN)
    assert isinstance(facts, NodeFacts)
    return facts


def check_order(pipeline: Sequence[Pass[Inputs]], *, given: frozenset[Property] = frozenset()) -> None:
    """Raise VerifyError unless every pass finds the properties it requires, before anything runs."""
    held = set(given)
    for item in pipeline:
        missing = sorted(prop.name for prop in item.requires - held)
        if missing:
            raise VerifyError(f"pass '{item.name}' requires {', '.join(missing)}, which no pass before it establishes")
        held = (held - item.breaks) | item.establishes


def run_pipeline(
    graph_module: fx.GraphModule,
    pipeline: Sequence[Pass[Inputs]],
    inputs: Inputs,
    *,
    given: frozenset[Property] = frozenset(),
) -> None:
    """Run the passes in order; after each one lint the graph and check every property that holds by then."""
    check_order(pipeline, given=given)
    held = set(given)
    for item in pipeline:
        item.run(graph_module, inputs)
        held = (held - item.breaks) | item.establishes
        graph_module.graph.lint()
        for prop in sorted(held, key=lambda prop: prop.name):
            try:
                prop.check(graph_module)
            except VerifyError as error:
                raise VerifyError(f"after pass '{item.name}', property '{prop.name}' does not hold: {error}") from error
    graph_module.recompile()
