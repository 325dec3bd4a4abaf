"""A model's parameter to its fact."""

import torch
from torch.nn import Parameter

from zinf_compile.facts import ParameterFact
from zinf_compile.passes.analysis.modules import block_of
from zinf_compile.terms import dtype_name

_ADAM_MOMENTS = 2  # of the master's dtype: what is assumed until the optimizer is known


def analyze_parameter(
    name: str,
    parameter: Parameter,
    *,
    compute_dtype: str | None,
    state_nbytes: int | None = None,
    is_apart: bool = False,
) -> ParameterFact:
    """Return the fact of one parameter, which is not looked at beyond its shape, dtype and ``requires_grad``.

    ``compute_dtype`` is that of floating-point compute copies, None the parameter's own. ``state_nbytes`` is what the
    optimizer keeps of it, None what Adam would. ``is_apart`` is for a device with memory of its own.
    """
    dtype = dtype_name(parameter.dtype)
    gathered = compute_dtype if compute_dtype and parameter.is_floating_point() else dtype
    master_nbytes = parameter.numel() * parameter.dtype.itemsize
    return ParameterFact(
        name=name,
        block=block_of(name),
        num_elements=parameter.numel(),
        dtype=dtype,
        compute_dtype=gathered,
        master_nbytes=master_nbytes,
        compute_nbytes=parameter.numel() * getattr(torch, gathered).itemsize,
        state_nbytes=_ADAM_MOMENTS * master_nbytes if state_nbytes is None else state_nbytes,
        trainable=parameter.requires_grad,
        is_apart=is_apart,
    )
