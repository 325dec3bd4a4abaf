"""Turns a model's parameter into its fact."""

from torch.nn import Linear, Module, Parameter

from zinf_compile.ir.copies import Code, Encoding, RowCode, StateSpec, element_states, encoded_state
from zinf_compile.ir.facts import ParameterFact
from zinf_compile.ir.glossary import dtype_name
from zinf_compile.ir.hardware import MemorySpace
from zinf_compile.ir.slices import Slice
from zinf_compile.passes.analysis.modules import block_of

_ADAM_STATES = ("exp_avg", "exp_avg_sq")  # in the master's dtype: assumed until the optimizer is known
_OF_A_CPU = MemorySpace(unified=True)


def analyze_parameter(
    name: str,
    parameter: Parameter,
    *,
    compute_dtype: str | None,
    states: tuple[StateSpec, ...] | None = None,
    state_code: Code | None = None,
    is_encoded: bool = False,
    memory: MemorySpace = _OF_A_CPU,
) -> ParameterFact:
    """Return the fact of one parameter, from its shape, dtype and ``requires_grad``; its values are not read.

    ``compute_dtype`` is the dtype of floating-point compute copies; None means the parameter's own. ``states`` are
    its optimizer states; None assumes Adam's. ``state_code`` is how they are encoded, where they can be. ``is_encoded``
    says whether a frozen parameter is stored as rows of int8, where it can be. ``memory`` is that of the device.
    """
    dtype = dtype_name(parameter.dtype)
    gathered = compute_dtype if compute_dtype and parameter.is_floating_point() else dtype
    master, shape = Encoding(dtype=dtype), tuple(parameter.shape)
    rows = RowCode.of_weight(shape, gathered) if is_encoded and not parameter.requires_grad else None
    return ParameterFact(
        name=name,
        slice=Slice.of_whole(name, shape),
        block=block_of(name),
        master=master,
        compute=Encoding(dtype=gathered, columns=None if rows is None else rows.columns),
        states=tuple(
            encoded_state(state, state_code)
            for state in (element_states(_ADAM_STATES, shape, master) if states is None else states)
        ),
        trainable=parameter.requires_grad,
        unified=memory.unified,
        integrated=memory.integrated,
    )


def find_linear_weights(model: Module) -> frozenset[Parameter]:
    """Return the weights of linear layers that no other module has, as an embedding may."""
    linear: set[Parameter] = set()
    others: set[Parameter] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                (linear if isinstance(module, Linear) and name == "weight" else others).add(parameter)
    return frozenset(linear - others)
