"""Which ops may run again in backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zinf_compile.ir.ops import GATHER
from zinf_compile.passes.analysis.repeatable import is_repeatable

aten = torch.ops.aten
COUNTED = torch.library.custom_op(
    "zinf_test_repeatable::counted", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor"
)


def _node(target: Callable[..., Any], *args: object, **meta: object) -> fx.Node:
    graph = fx.Graph()
    node = graph.call_function(target, (graph.placeholder("x"), *args))
    node.meta.update(meta)
    return node


@pytest.mark.parametrize("node", [_node(aten.gelu.default), _node(aten.mul.Tensor, 2), _node(aten.mm.default)])
def test_what_only_computes_may(node: fx.Node) -> None:
    assert is_repeatable(node)


@pytest.mark.parametrize(
    "target",
    [
        aten.bernoulli.p,
        aten.native_dropout.default,
        aten.rand_like.default,
        aten.add_.Tensor,
        GATHER,
        COUNTED._opoverload,
    ],
)
def test_what_draws_writes_or_is_not_known_may_not(target: Callable[..., Any]) -> None:
    assert not is_repeatable(_node(target))


def test_attention_may_without_dropout() -> None:
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert is_repeatable(_node(attention, None, None))
    assert is_repeatable(_node(attention, None, None, 0.0))
    assert not is_repeatable(_node(attention, None, None, 0.1))


def test_what_the_user_has_decided_stays() -> None:
    assert not is_repeatable(_node(aten.gelu.default, recompute=CheckpointPolicy.MUST_SAVE))
    assert not is_repeatable(_node(aten.gelu.default, recompute=CheckpointPolicy.PREFER_SAVE))
    assert not is_repeatable(_node(aten.gelu.default, recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=3))


def test_inputs_are_no_ops() -> None:
    assert not is_repeatable(fx.Graph().placeholder("x"))
