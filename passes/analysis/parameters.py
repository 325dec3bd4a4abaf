"""Turns a model's parameter into its fact."""

from torch.nn import Parameter

from zinf_compile.ir.copies import Code, Encoding, StateSpec, element_states, encoded_state
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
    memory: MemorySpace = _OF_A_CPU,
) -> ParameterFact:
    """Return the fact of one parameter, from its shape, dtype and ``requires_grad``; its values are not read.

    ``compute_dtype`` is the dtype of floating-point compute copies; None means the parameter's own. ``states`` are
    its optimizer states; None assumes Adam's. ``state_code`` is how they are encoded, where they can be. ``memory`` is
    that of the device.
    """
    dtype = dtype_name(parameter.dtype)
    gathered = compute_dtype if compute_dtype and parameter.is_floating_point() else dtype
    master, shape = Encoding(dtype=dtype), tuple(parameter.shape)
    return ParameterFact(
        name=name,
        slice=Slice.of_whole(name, shape),
        block=block_of(name),
        master=master,
        compute=Encoding(dtype=gathered),
        states=tuple(
            encoded_state(state, state_code)
            for state in (element_states(_ADAM_STATES, shape, master) if states is None else states)
        ),
        trainable=parameter.requires_grad,
        unified=memory.unified,
        integrated=memory.integrated,
    )
