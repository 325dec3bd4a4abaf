"""The pipelines, in order, on one screen. The order is checked before anything runs."""

from torch import fx

from zinf_compile.passes.analysis.collect import CapturedGraph
from zinf_compile.passes.contract import (
    ComponentInputs,
    FormInputs,
    JointInputs,
    LowerInputs,
    Pass,
    PrepareInputs,
    RoundInputs,
    SegmentInputs,
    TileInputs,
    run_pipeline,
)
from zinf_compile.passes.fx_edit import generate_code
from zinf_compile.passes.properties import VALUES_KNOWN
from zinf_compile.passes.transforms.joint.divide_gradients import DIVIDE_GRADIENTS
from zinf_compile.passes.transforms.joint.divide_saved import divide_saved
from zinf_compile.passes.transforms.joint.fold_casts import FOLD_CASTS
from zinf_compile.passes.transforms.joint.hoist_views import HOIST_VIEWS
from zinf_compile.passes.transforms.joint.merge_all_reduces import MERGE_ALL_REDUCES
from zinf_compile.passes.transforms.joint.merge_gradients import MERGE_GRADIENTS
from zinf_compile.passes.transforms.joint.merge_subexpressions import MERGE_SUBEXPRESSIONS
from zinf_compile.passes.transforms.joint.place_stores import PLACE_STORES
from zinf_compile.passes.transforms.joint.tag_recompute import TAG_RECOMPUTE
from zinf_compile.passes.transforms.lowering.bind_outputs import BIND_OUTPUTS
from zinf_compile.passes.transforms.lowering.box_inputs import BOX_INPUTS
from zinf_compile.passes.transforms.lowering.launch_gathers import LAUNCH_GATHERS
from zinf_compile.passes.transforms.lowering.let_views_copy import LET_VIEWS_COPY
from zinf_compile.passes.transforms.lowering.release_transfers import RELEASE_TRANSFERS
from zinf_compile.passes.transforms.lowering.sink_gradients import SINK_GRADIENTS
from zinf_compile.passes.transforms.lowering.start_transfers import START_TRANSFERS
from zinf_compile.passes.transforms.lowering.swap_activations import SWAP_ACTIVATIONS
from zinf_compile.passes.transforms.prepare.gather_components import GATHER_COMPONENTS
from zinf_compile.passes.transforms.prepare.insert_gathers import INSERT_GATHERS
from zinf_compile.passes.transforms.prepare.work_in_rounds import WORK_IN_ROUNDS
from zinf_compile.passes.transforms.segments.make_segments import MAKE_SEGMENTS
from zinf_compile.passes.transforms.tiling.cut_blocks import CUT_BLOCKS
from zinf_compile.passes.transforms.tiling.fuse_linear_loss import FUSE_LINEAR_LOSSES
from zinf_compile.passes.transforms.tiling.tile_chains import TILE_CHAINS
from zinf_compile.passes.transforms.tiling.tile_parameters import TILE_PARAMETERS

PREPARE: tuple[Pass[PrepareInputs], ...] = (INSERT_GATHERS,)

QUANTISED: tuple[Pass[ComponentInputs], ...] = (GATHER_COMPONENTS,)

ROUNDS: tuple[Pass[RoundInputs], ...] = (WORK_IN_ROUNDS,)

TILE: tuple[Pass[TileInputs], ...] = (FUSE_LINEAR_LOSSES, CUT_BLOCKS, TILE_CHAINS, TILE_PARAMETERS)

JOINT: tuple[Pass[JointInputs], ...] = (MERGE_GRADIENTS, DIVIDE_GRADIENTS, MERGE_ALL_REDUCES, MERGE_SUBEXPRESSIONS)

FORM: tuple[Pass[FormInputs], ...] = (FOLD_CASTS, TAG_RECOMPUTE)

INFERENCE: tuple[Pass[FormInputs], ...] = (MERGE_ALL_REDUCES, FOLD_CASTS)

SPLIT_FORWARD: tuple[Pass[FormInputs], ...] = (HOIST_VIEWS,)

SPLIT_BACKWARD: tuple[Pass[FormInputs], ...] = (PLACE_STORES,)

SEGMENT: tuple[Pass[SegmentInputs], ...] = (MAKE_SEGMENTS,)

LOWER: tuple[Pass[LowerInputs], ...] = (
    SWAP_ACTIVATIONS,
    START_TRANSFERS,
    LAUNCH_GATHERS,
    BIND_OUTPUTS,
    SINK_GRADIENTS,
    RELEASE_TRANSFERS,
    LET_VIEWS_COPY,
    BOX_INPUTS,
)


def prepare_graph(graph_module: fx.GraphModule, inputs: PrepareInputs) -> None:
    """Edit a torch-level graph in place so that autograd can trace it."""
    run_pipeline(graph_module, PREPARE, inputs)


def gather_components(graph_module: fx.GraphModule, inputs: ComponentInputs) -> None:
    """Edit a torch-level graph in place so that it gathers the components of quantised parameters."""
    run_pipeline(graph_module, QUANTISED, inputs)


def work_in_rounds(graph_module: fx.GraphModule, inputs: RoundInputs) -> None:
    """Edit a torch-level graph in place so that it computes this rank's stages for the batches of all ranks."""
    run_pipeline(graph_module, ROUNDS, inputs)


def tile_graph(graph_module: fx.GraphModule, inputs: TileInputs) -> None:
    """Edit a torch-level graph in place so that it reads some parameters by tiles."""
    run_pipeline(graph_module, TILE, inputs)


def edit_joint_graph(graph_module: fx.GraphModule, inputs: JointInputs) -> None:
    """Edit a joint graph in place, once: all of its forms come from what this leaves."""
    run_pipeline(graph_module, JOINT, inputs)


def edit_form(graph_module: fx.GraphModule, inputs: FormInputs) -> None:
    """Edit a copy of the joint graph in place so that the partitioner splits it as ``inputs`` say."""
    run_pipeline(graph_module, FORM, inputs)


def edit_inference_graph(graph_module: fx.GraphModule, inputs: FormInputs) -> None:
    """Edit a graph without backward in place so that it can be analysed."""
    run_pipeline(graph_module, INFERENCE, inputs)


def edit_split_graph(captured: CapturedGraph, inputs: FormInputs) -> CapturedGraph:
    """Edit the graphs from the partitioner in place so that they can be analysed, and return them."""
    assert captured.backward is not None
    run_pipeline(captured.forward, SPLIT_FORWARD, inputs)
    run_pipeline(captured.backward, SPLIT_BACKWARD, inputs)
    return captured if inputs.division is None else divide_saved(captured, inputs.division)


def segment_graph(graph_module: fx.GraphModule, inputs: SegmentInputs) -> None:
    """Edit a forward or backward graph in place so that it computes in segments."""
    run_pipeline(graph_module, SEGMENT, inputs)


def lower_graph(graph_module: fx.GraphModule, inputs: LowerInputs) -> None:
    """Edit a forward or backward graph in place so that it carries out the plan, and generate its code."""
    run_pipeline(graph_module, LOWER, inputs, given=frozenset({VALUES_KNOWN}))
    generate_code(graph_module)
