"""Merge ops that compute the same of the same arguments, and drop those whose result nothing reads.

torch's partitioner would do so in every split of a joint graph. Emitted::

    sin = aten.sin(x)                  instead of    sin = aten.sin(x)
    out = aten.mul(sin, sin)                         sin_1 = aten.sin(x)
                                                     out = aten.mul(sin, sin_1)

Two equal contributions to the gradient of a parameter must have been summed: as two stores of one value, they would
become one.
"""

from torch import fx
from torch._functorch.compile_utils import fx_graph_cse

from zinf_compile.passes.contract import JointInputs, Pass
from zinf_compile.passes.properties import ONE_GRADIENT_EACH


def _run(graph_module: fx.GraphModule, inputs: JointInputs) -> None:
    graph_module.graph.eliminate_dead_code()
    graph_module.graph = fx_graph_cse(graph_module.graph)


MERGE_SUBEXPRESSIONS: Pass[JointInputs] = Pass(
    name="merge_subexpressions", run=_run, requires=frozenset({ONE_GRADIENT_EACH})
)
