"""Graphs of an optimized model that would outlive its process are refused; the error says what to do, and that works."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.params import numbers

BUDGETS = {"device_memory": "8MiB", "host_memory": "8MiB"}
REFUSED = (
    r"an optimized \w+ cannot be exported, traced or scripted: its graph would hold the numbers of parameters in a store "
    r"of this process, and not their values; export or trace it inside zinf_compile\.full_parameters\(model\), or load "
    r"its state_dict\(\) into a plain model"
)


def export(model: nn.Module, x: Tensor) -> Callable[..., Any]:
    return torch.export.export(model, (x,)).module()


def export_strictly(model: nn.Module, x: Tensor) -> Callable[..., Any]:
    return torch.export.export(model, (x,), strict=True).module()


def trace(model: nn.Module, x: Tensor) -> Callable[..., Any]:
    return torch.jit.trace(model, (x,))  # type: ignore[no-any-return]


def script(model: nn.Module, x: Tensor) -> Callable[..., Any]:
    return torch.jit.script(model)  # type: ignore[no-any-return]


@pytest.fixture(params=[True, False], ids=["captured", "eager"])
def optimized(request: pytest.FixtureRequest, model: nn.Module) -> nn.Module:
    return zinf_compile.optimize(model, capture=request.param, **BUDGETS)


@pytest.mark.parametrize("make", [export, export_strictly, trace, script])
def test_a_graph_for_another_process(optimized: nn.Module, make: Callable[[nn.Module, Tensor], object]) -> None:
    x = torch.ones(2, 200)
    # Strict export traces with Dynamo, which wraps our message.
    error = torch._dynamo.exc.Unsupported if make is export_strictly else UnsupportedError
    with pytest.raises(error, match=REFUSED):
        make(optimized, x)
    optimized(x).sum().backward()
    zinf_compile.close(optimized)


@pytest.mark.parametrize("make", [export, export_strictly, trace])
def test_the_values_inside_full_parameters(
    optimized: nn.Module, make: Callable[[nn.Module, Tensor], Callable[..., Any]]
) -> None:
    x = torch.ones(2, 200)
    expected = optimized(x)
    with zinf_compile.full_parameters(optimized):
        made = make(optimized, x)
    zinf_compile.close(optimized)
    assert torch.equal(made(x), expected)


def test_a_symbolic_trace_calls_the_model(optimized: nn.Module) -> None:
    x = torch.ones(2, 200)
    traced = torch.fx.symbolic_trace(optimized)
    assert torch.equal(traced(x), optimized(x))
    zinf_compile.close(optimized)


def test_a_number_means_nothing_in_another_process() -> None:
    assert numbers.__file__ is not None
    firsts = []
    for name in ("one", "another"):  # imported twice, as by two processes
        spec = importlib.util.spec_from_file_location(name, numbers.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        firsts.append(module.new_id())
    assert abs(firsts[0] - firsts[1]) >= 2**20
    assert max(firsts) < 2**63 - 2**32  # arguments of ops have 64 bits
