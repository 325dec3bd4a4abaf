"""TAG_RECOMPUTE: which values torch's partitioner must not save. Graphs are hand-made, with the module of each node."""

from collections.abc import Callable, Collection

import pytest
import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from zinf_compile.ir.glossary import ActivationPolicy
from zinf_compile.ir.ops import GATHER
from zinf_compile.passes.contract import FormInputs, run_pipeline
from zinf_compile.passes.transforms.joint.tag_recompute import TAG_RECOMPUTE

Function = Callable[..., object]
MUST_RECOMPUTE, MUST_SAVE = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE


def _tag(
    graph_module: fx.GraphModule,
    policy: ActivationPolicy,
    modules: dict[str, str] | None = None,
    recomputed: Collection[str] = (),
    *,
    keeps_collectives: bool = False,
) -> None:
    """Run the pass with each named node in its module; ``modules`` maps names of nodes to paths."""
    for node in graph_module.graph.nodes:
        path = (modules or {}).get(node.name)
        if path is not None:
            node.meta["nn_module_stack"] = {path: (f"L['self'].{path}", torch.nn.Linear)}
    inputs = FormInputs(policy=policy, recomputed=frozenset(recomputed), keeps_collectives=keeps_collectives)
    run_pipeline(graph_module, [TAG_RECOMPUTE], inputs)


def _tags(graph_module: fx.GraphModule) -> dict[str, CheckpointPolicy]:
    return {node.name: node.meta["recompute"] for node in graph_module.graph.nodes if "recompute" in node.meta}


def _regions(graph_module: fx.GraphModule) -> dict[str, int]:
    return {node.name: node.meta["ac_graph_id"] for node in graph_module.graph.nodes if "ac_graph_id" in node.meta}


@pytest.mark.parametrize("policy", ActivationPolicy)
def test_gathers_their_views_and_casts_are_never_saved(
    trace: Function, gather: Function, policy: ActivationPolicy
) -> None:
    def joint(anchor: Tensor, x: Tensor) -> Tensor:
        weight = gather(anchor, "a", 4, 4)
        return torch.mm(x, weight.t().to(torch.float64).view(4, 4))

    graph_module = trace(joint, (2, 4))
    for node in graph_module.graph.nodes:  # mm of two dtypes cannot be traced; only the tags matter
        assert node.op != "call_module"
    _tag(graph_module, policy)
    assert _tags(graph_module) == dict.fromkeys(("gather", "t", "_to_copy", "view"), MUST_RECOMPUTE)


def test_a_piece_of_a_split_weight_is_never_saved(trace: Function, gather: Function) -> None:
    def joint(anchor: Tensor, x: Tensor) -> Tensor:
        left, right = gather(anchor, "a", 4, 4).split(2, dim=1)
        return torch.mm(x, left) + torch.mm(x, right)

    graph_module = trace(joint, (2, 4))
    _tag(graph_module, ActivationPolicy.SAVE)
    assert _tags(graph_module) == dict.fromkeys(("gather", "split", "getitem", "getitem_1"), MUST_RECOMPUTE)


def test_what_is_computed_from_a_weight_may_be_saved(trace: Function, gather: Function) -> None:
    graph_module = trace(lambda anchor, x: torch.sin(gather(anchor, "a", 4)) + x, (4,))
    _tag(graph_module, ActivationPolicy.SAVE)
    assert _tags(graph_module) == {"gather": MUST_RECOMPUTE}


def test_each_repeated_block_is_one_region(trace: Function) -> None:
    graph_module = trace(lambda anchor, x: torch.tan(torch.exp(torch.cos(torch.sin(x)))), (4,))
    modules = {"sin": "embed", "cos": "layers.0.up", "exp": "layers.0.down", "tan": "layers.1.up"}
    _tag(graph_module, ActivationPolicy.RECOMPUTE_BLOCKS, modules)
    assert _tags(graph_module) == dict.fromkeys(("cos", "exp", "tan"), MUST_RECOMPUTE)
    assert _regions(graph_module) == {"cos": 0, "exp": 0, "tan": 1}


def test_a_block_that_runs_twice_is_two_regions(trace: Function) -> None:
    graph_module = trace(lambda anchor, x: torch.exp(torch.cos(torch.sin(x))), (4,))
    modules = {"sin": "layers.0", "cos": "between", "exp": "layers.0"}
    _tag(graph_module, ActivationPolicy.RECOMPUTE_BLOCKS, modules)
    assert _regions(graph_module) == {"sin": 0, "exp": 1}


def test_random_numbers_are_saved(trace: Function) -> None:
    graph_module = trace(lambda anchor, x: torch.bernoulli(torch.sin(x)) * x, (4,))
    modules = {"sin": "layers.0", "bernoulli": "layers.0", "mul": "layers.0"}
    _tag(graph_module, ActivationPolicy.RECOMPUTE_BLOCKS, modules)
    assert _tags(graph_module) == {"sin": MUST_RECOMPUTE, "bernoulli": MUST_SAVE, "mul": MUST_RECOMPUTE}


@pytest.mark.parametrize("keeps", [False, True])
def test_collectives_are_saved_where_other_ranks_may_recompute_something_else(trace: Function, keeps: bool) -> None:
    def joint(anchor: Tensor, x: Tensor) -> Tensor:
        total = torch.ops._c10d_functional.all_reduce(torch.sin(x), "sum", "group")
        return torch.cos(torch.ops._c10d_functional.wait_tensor(total))

    graph_module = trace(joint, (4,))
    modules = dict.fromkeys(("sin", "all_reduce", "wait_tensor", "cos"), "layers.0")
    _tag(graph_module, ActivationPolicy.RECOMPUTE_BLOCKS, modules, keeps_collectives=keeps)
    collectives = dict.fromkeys(("all_reduce", "wait_tensor"), MUST_SAVE if keeps else MUST_RECOMPUTE)
    assert _tags(graph_module) == {"sin": MUST_RECOMPUTE, **collectives, "cos": MUST_RECOMPUTE}


def test_backward_nodes_are_not_tagged(trace: Function) -> None:
    graph_module = trace(lambda anchor, x: torch.cos(torch.sin(x)), (4,))
    (cos,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    cos.meta["fwd_nn_module_stack"] = {"layers.0": ("L['self'].layers.0", torch.nn.Linear)}
    _tag(graph_module, ActivationPolicy.RECOMPUTE_BLOCKS, {"sin": "layers.0", "cos": "layers.0"})
    assert _tags(graph_module) == {"sin": MUST_RECOMPUTE}


def test_regions_of_the_user_keep_their_tags(trace: Function) -> None:
    graph_module = trace(lambda anchor, x: torch.cos(torch.sin(x)), (4,))
    (sin,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    sin.meta.update(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=42)
    _tag(graph_module, ActivationPolicy.RECOMPUTE_BLOCKS, {"sin": "layers.0", "cos": "layers.0"})
    assert _tags(graph_module) == {"sin": CheckpointPolicy.PREFER_RECOMPUTE, "cos": MUST_RECOMPUTE}
    assert _regions(graph_module) == {"sin": 42, "cos": 0}


def test_a_gather_in_a_block_belongs_to_no_region(trace: Function, gather: Function) -> None:
    graph_module = trace(lambda anchor, x: torch.mm(x, gather(anchor, "a", 4, 4).t()), (2, 4))
    modules = dict.fromkeys(("gather", "t", "mm"), "layers.0")
    _tag(graph_module, ActivationPolicy.RECOMPUTE_BLOCKS, modules)
    (gathered,) = graph_module.graph.find_nodes(op="call_function", target=GATHER)
    assert gathered.meta["recompute"] is MUST_RECOMPUTE
    assert _regions(graph_module) == {"mm": 0}


def test_ops_that_are_named_are_made_again_but_for_those_of_the_user(trace: Function) -> None:
    graph_module = trace(lambda anchor, x: torch.exp(torch.cos(torch.sin(x))), (4,))
    (sin,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    sin.meta.update(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=42)
    _tag(graph_module, ActivationPolicy.RECOMPUTE_VALUES, recomputed=("sin", "cos"))
    assert _tags(graph_module) == {"sin": CheckpointPolicy.PREFER_RECOMPUTE, "cos": MUST_RECOMPUTE}
    assert _regions(graph_module) == {"sin": 42}


def test_results_and_views_of_ops_that_are_named_are_made_again_too(trace: Function) -> None:
    """Otherwise the partitioner would save those instead of the tagged value."""

    def forward(anchor: object, x: torch.Tensor) -> torch.Tensor:
        largest, _ = torch.ops.aten.max.dim(x, 1)
        return torch.exp(torch.sin(largest).view(2, 2))

    graph_module = trace(forward, (4, 3))
    _tag(graph_module, ActivationPolicy.RECOMPUTE_VALUES, recomputed=("max_1", "sin"))
    assert _tags(graph_module) == dict.fromkeys(["max_1", "getitem", "getitem_1", "sin", "view"], MUST_RECOMPUTE)
