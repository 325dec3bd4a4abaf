"""LET_VIEWS_COPY: views of tensors that may have other strides than the captured ones copy."""

from collections.abc import Callable
from typing import Any

import torch
from expecttest import assert_expected_inline

from zinf_compile.passes.transforms.lowering.let_views_copy import LET_VIEWS_COPY

Function = Callable[..., Any]


def test_views_behind_tensors_of_different_strides_become_reshapes(trace: Function, lower: Function) -> None:
    def run(anchor: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        alike, differing = x + y, x + y.t().contiguous().t()
        return torch.ops.aten._unsafe_view(differing.view(9), [3, 3]) + alike.view(9).view(3, 3)

    assert_expected_inline(
        lower(trace(run, (3, 3), (3, 3)), [LET_VIEWS_COPY]),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
y_1 = placeholder[y_1]
add = aten.add.Tensor(x_1, y_1)
t = aten.t(y_1)
clone = aten.clone(t, memory_format=contiguous_format)
t_1 = aten.t(clone)
add_1 = aten.add.Tensor(x_1, t_1)
view = aten.reshape(add_1, [9])
_unsafe_view = aten.reshape(view, [3, 3])
view_1 = aten.view(add, [9])
view_2 = aten.view(view_1, [3, 3])
add_2 = aten.add.Tensor(_unsafe_view, view_2)
return add_2
""",
    )
