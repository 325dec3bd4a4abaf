"""State sizes found with a small parameter are those that the optimizer keeps for the real one."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from zinf_compile.ir.copies import Granularity
from zinf_compile.ir.errors import ConfigError, UnsupportedError
from zinf_compile.ir.slices import Slice
from zinf_compile.passes.capture.offline.optimizer_state import StatesOfOptimizer
from zinf_compile.runtime.optim.supported import check_supported

OPTIMIZERS = (
    torch.optim.SGD,
    functools.partial(torch.optim.SGD, momentum=0.9),
    torch.optim.AdamW,
    functools.partial(torch.optim.AdamW, amsgrad=True),
    torch.optim.Adafactor,
    torch.optim.Rprop,
)


def nbytes_of(make: Callable[..., Optimizer], parameter: torch.Tensor) -> int:
    states = StatesOfOptimizer(make, check=check_supported).of(parameter)
    whole = Slice.of_whole("weight", parameter.shape)
    return sum(state.encoding.nbytes(state.num_elements_of(whole)) for state in states)


def test_states_have_the_names_and_shapes_of_a_real_step() -> None:
    parameter = torch.empty(40, 30, device="meta")
    states = StatesOfOptimizer(torch.optim.AdamW, check=check_supported).of(parameter)
    assert [(state.name, state.shape, state.granularity) for state in states] == [
        ("exp_avg", (40, 30), Granularity.ELEMENT),
        ("exp_avg_sq", (40, 30), Granularity.ELEMENT),
    ]
    states = StatesOfOptimizer(torch.optim.Adafactor, check=check_supported).of(parameter)
    assert {(state.name, state.shape, state.granularity) for state in states} == {
        ("row_var", (40, 1), Granularity.ROW),
        ("col_var", (1, 30), Granularity.MATRIX),
    }


@pytest.mark.parametrize("shape", [(40, 30), (50,), (4, 8, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_bytes_are_those_of_a_real_step(make: Callable[..., Optimizer], dtype: torch.dtype, shape: Any) -> None:
    parameter = Parameter(torch.ones(shape, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    kept = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor) and value.dim()]
    assert nbytes_of(make, parameter) == sum(value.nbytes for value in kept)


def test_the_parameter_needs_no_memory() -> None:
    parameter = torch.empty(10**6, 10**6, device="meta")
    assert nbytes_of(torch.optim.AdamW, parameter) == 8 * 10**12
    assert nbytes_of(torch.optim.Adafactor, parameter) == 4 * 2 * 10**6


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (torch.optim.Muon, ConfigError, "cannot be created for a parameter of 1 dimensions: Muon only supports 2D"),
        (len, ConfigError, "returned int; give a class of torch.optim"),
        (torch.optim.LBFGS, UnsupportedError, "LBFGS is not supported by zinf_compile"),
    ],
)
def test_what_is_no_optimizer_for_it_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        StatesOfOptimizer(make, check=check_supported).of(torch.empty(3, device="meta"))
