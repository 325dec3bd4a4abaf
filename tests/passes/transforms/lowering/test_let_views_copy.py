"""LET_VIEWS_COPY: views of a tensor with other strides than the captured ones copy."""

from collections.abc import Callable
from typing import Any

import torch
from expecttest import assert_expected_inline

from zinf_compile.passes.transforms.lowering.let_views_copy import LET_VIEWS_COPY

Function = Callable[..., Any]


def test_views_become_reshapes(trace: Function, lower: Function) -> None:
    assert_expected_inline(
        lower(trace(lambda anchor, x: torch.ops.aten._unsafe_view(x.view(6), [3, 2]), (2, 3)), [LET_VIEWS_COPY]),
        """\
anchor_1 = placeholder[anchor_1]
x_1 = placeholder[x_1]
view = aten.reshape(x_1, [6])
_unsafe_view = aten.reshape(view, [3, 2])
return _unsafe_view
""",
    )
