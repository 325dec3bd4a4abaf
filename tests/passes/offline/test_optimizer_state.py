"""State sizes found on a small parameter are those that the optimizer keeps of the real one."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from zinf_compile.errors import ConfigError, UnsupportedError
from zinf_compile.passes.offline.optimizer_state import StateSizes
from zinf_compile.runtime.shadow import check_supported

OPTIMIZERS = (
    torch.optim.SGD,
    functools.partial(torch.optim.SGD, momentum=0.9),
    torch.optim.AdamW,
    functools.partial(torch.optim.AdamW, amsgrad=True),
    torch.optim.Adafactor,
    torch.optim.Rprop,
)


@pytest.mark.parametrize("shape", [(40, 30), (50,), (4, 8, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_bytes_are_those_of_a_real_step(make: Callable[..., Optimizer], dtype: torch.dtype, shape: Any) -> None:
    parameter = Parameter(torch.ones(shape, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    kept = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor) and value.dim()]
    sizes = StateSizes(make, check=check_supported)
    assert sizes.nbytes(parameter) == sum(value.nbytes for value in kept)


def test_the_parameter_needs_no_memory() -> None:
    parameter = torch.empty(10**6, 10**6, device="meta")
    assert StateSizes(torch.optim.AdamW, check=check_supported).nbytes(parameter) == 8 * 10**12
    assert StateSizes(torch.optim.Adafactor, check=check_supported).nbytes(parameter) == 4 * 2 * 10**6


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (torch.optim.Muon, ConfigError, "cannot be made for a parameter of 1 dimensions: Muon only supports 2D"),
        (len, ConfigError, "returned int; give a class of torch.optim"),
        (torch.optim.LBFGS, UnsupportedError, "LBFGS cannot step parameters that live in a store"),
    ],
)
def test_what_is_no_optimizer_for_it_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        StateSizes(make, check=check_supported).nbytes(torch.empty(3, device="meta"))
