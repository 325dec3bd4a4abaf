"""BOX_INPUTS: inputs are passed in one list, and are freed after their last use."""

import weakref
from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from zinf_compile.passes.transforms.lowering.box_inputs import BOX_INPUTS, take_input

Function = Callable[..., object]


def test_inputs_are_taken_from_one_list_under_their_names(trace: Function, lower: Function) -> None:
    assert_expected_inline(
        lower(trace(lambda anchor, x, y: torch.sin(x) + y, (2,), (2,)), [BOX_INPUTS]),
        """\
boxed_inputs = placeholder[boxed_inputs]
anchor_1 = take_input(boxed_inputs, 0)
x_1 = take_input(boxed_inputs, 1)
y_1 = take_input(boxed_inputs, 2)
sin = aten.sin(x_1)
add = aten.add.Tensor(sin, y_1)
return add
""",
    )


def test_an_input_taken_is_forgotten() -> None:
    inputs = ["first", "second"]
    assert take_input(inputs, 1) == "second"
    assert inputs == ["first", None]


def test_a_saved_value_is_freed_after_its_last_use(trace: Function, lower: Function) -> None:
    alive: list[bool] = []

    def backward(anchor: Tensor, saved: Tensor) -> Tensor:
        return torch.cos(torch.sin(saved))

    graph_module = trace(backward, (2,))
    lower(graph_module, [BOX_INPUTS])
    saved = torch.ones(2)
    watched = weakref.ref(saved)
    (cos,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    with graph_module.graph.inserting_before(cos):
        graph_module.graph.call_function(lambda: alive.append(watched() is not None))
    graph_module.recompile()
    inputs: list[Tensor] = [torch.empty(0), saved]
    del saved
    result = graph_module(inputs)
    assert torch.equal(result, torch.cos(torch.sin(torch.ones(2))))
    assert alive == [False]
