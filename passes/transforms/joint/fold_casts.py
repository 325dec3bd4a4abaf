"""Fold casts into the gather before them: the gather moves a narrower copy that already holds the result of the cast.

Emitted, under ``torch.autocast`` for instance::

    weight = zinf.gather(anchor, param, shape, bfloat16, device)     instead of    gather = zinf.gather(.., float32, ..)
                                                                                   weight = aten._to_copy(gather,
                                                                                   bfloat16)

Views in between are recomputed from the narrower value. Gradients keep the dtype of the parameter, as autograd computes
them.
"""

from torch import fx

from zinf_compile.ir.errors import VerifyError
from zinf_compile.ir.ops import GATHER
from zinf_compile.passes.analysis.casts import find_cast_reads
from zinf_compile.passes.contract import FormInputs, Pass
from zinf_compile.passes.fx_edit import set_values_again


def _run(graph_module: fx.GraphModule, inputs: FormInputs) -> None:
    graph = graph_module.graph
    for gather in graph.find_nodes(op="call_function", target=GATHER):
        dtype = inputs.narrowed.get(gather.args[1])
        if dtype is None:
            continue
        reads = find_cast_reads(gather)
        if reads is None:
            raise VerifyError(f"'{gather.name}' cannot move {dtype}: not every read of it is a cast")
        gather.update_arg(3, dtype)
        set_values_again(graph, (gather, *reads.views))
        for cast in reads.casts:
            source = cast.args[0]
            assert isinstance(source, fx.Node)
            cast.replace_all_uses_with(source)
            graph.erase_node(cast)


FOLD_CASTS: Pass[FormInputs] = Pass(name="fold_casts", run=_run)
