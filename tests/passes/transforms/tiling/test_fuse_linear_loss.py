"""A linear layer and its loss become one call: which patterns are found, the emitted code, and equal results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from zinf_compile.passes.fx_edit import dump_graph
from zinf_compile.passes.transforms.tiling.fuse_linear_loss import find_linear_losses, fuse_linear_loss
from zinf_compile.runtime.execute.op_bodies import register

CLASSES = 11
TARGET = torch.tensor([3, 0, 7, 10, 2, 2])


def _inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = ((2, 3, 8), (CLASSES, 8), (CLASSES,))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def _plain(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden.view(-1, 8), weight, bias), TARGET, label_smoothing=0.1)


def _shifted(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, bias)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), TARGET[:4], reduction="sum", ignore_index=7)


def _sliced_rows(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias).view(-1, CLASSES)[1:, :], TARGET[1:])


def _weighted(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, bias).reshape(6, CLASSES)
    return 2.0 * F.cross_entropy(logits, TARGET, torch.arange(CLASSES).double() + 1.0, reduction="none").sum()


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("function", [_plain, _shifted, _sliced_rows, _weighted])
def test_the_fused_loss_is_the_loss(
    function: Callable[..., Tensor], one_pass: bool, capture: Callable[..., Any]
) -> None:
    register()
    inputs = _inputs()
    expected = capture(function, *inputs).run()
    captured = capture(function, *inputs)
    (found,) = find_linear_losses(captured.graph_module.graph)
    fuse_linear_loss(found, tile_rows=2, one_pass=one_pass)
    assert F.linear not in {node.target for node in captured.graph_module.graph.nodes}
    measured = captured.run()
    assert measured.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(measured[key], value, rtol=1e-10, atol=1e-10)


def test_logits_cast_to_float_are_what_the_sums_are_made_in(capture: Callable[..., Any]) -> None:
    register()

    def model(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight, bias).float().view(-1, CLASSES), TARGET)

    captured = capture(model, *_inputs(torch.bfloat16))
    (found,) = find_linear_losses(captured.graph_module.graph)
    fuse_linear_loss(found)
    assert_expected_inline(
        dump_graph(captured.graph_module.graph),
        """\
l_hidden_ = placeholder[L_hidden_]
l_weight_ = placeholder[L_weight_]
l_bias_ = placeholder[L_bias_]
g_target_ = placeholder[G_TARGET_]
l_hidden__rows = reshape(l_hidden_, [-1, 8])
cross_entropy_fused = linear_cross_entropy(l_hidden__rows, l_weight_, g_target_, l_bias_, tile_rows=None, one_pass=None)
return cross_entropy_fused
""",
    )
    assert captured.run()["output"].dtype is torch.float32


def test_a_loss_keeps_its_dtype(capture: Callable[..., Any]) -> None:
    register()
    captured = capture(_plain, *_inputs(torch.bfloat16))
    (found,) = find_linear_losses(captured.graph_module.graph)
    assert fuse_linear_loss(found).name == "cross_entropy_typed"
    assert captured.run()["output"].dtype is torch.bfloat16


def _returned(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits.view(-1, CLASSES), TARGET) + logits.sum()


def _part_of_the_classes(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden.view(-1, 8), weight, bias)[:, :11], TARGET)


def _classes_in_another_order(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden.view(-1, 8), weight, bias).flip(1), TARGET)


def _classes_of_other_rows(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias).view(3, 2, CLASSES)[1:].view(-1, CLASSES), TARGET[:4])


def _probabilities(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden.view(-1, 8), weight, bias), torch.ones(6, CLASSES, dtype=torch.float64))


def _more_dimensions(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias), torch.zeros(2, CLASSES, dtype=torch.int64))


def _narrowed(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden.view(-1, 8), weight, bias).to(torch.bfloat16), TARGET)


def _under_autocast(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(F.linear(hidden.float().view(-1, 8), weight.float(), bias.float()), TARGET)


@pytest.mark.parametrize(
    "function",
    [
        _returned,
        _part_of_the_classes,
        _classes_in_another_order,
        _classes_of_other_rows,
        _probabilities,
        _more_dimensions,
        _narrowed,
        _under_autocast,
    ],
)
def test_what_is_left_alone(function: Callable[..., Tensor], capture: Callable[..., Any]) -> None:
    assert list(find_linear_losses(capture(function, *_inputs()).graph_module.graph)) == []
