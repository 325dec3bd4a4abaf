"""Chooses where a model's first values come from: the model, its own initialisation, or files."""

import os
import weakref
from collections.abc import Iterable, Sequence

from torch.nn import Module, Parameter

from zinf_compile.ir.errors import ConfigError, UnsupportedError
from zinf_compile.runtime.model.quantised import describe_own, has_own_bytes
from zinf_compile.runtime.params.records import return_to_meta
from zinf_compile.weights.file_values import FileValues
from zinf_compile.weights.quantised_files import quantisation_of
from zinf_compile.weights.reset_values import ResetValues

Init = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
Values = ResetValues | FileValues


def choose_values(model: Module, init: Init) -> Values | None:
    """Return the source of the first values of ``model``; None if it already has them. Moves nothing.

    ConfigError for an ``init`` that does not give every tensor a value, UnsupportedError for a model that cannot be
    filled.
    """
    if init is not None and not isinstance(init, str | os.PathLike):
        is_list = isinstance(init, Sequence) and len(init) > 0
        if not is_list or not all(isinstance(path, str | os.PathLike) for path in init):
            raise ConfigError(
                f"init={init!r} is neither 'reset' nor a safetensors file, a folder of them, or a list of files"
            )
    on_meta = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
    if init is None:
        if on_meta:
            raise ConfigError(
                f"the model is on the meta device, so it has no values ('{next(iter(on_meta))}' and {len(on_meta) - 1} "
                "more); say init='reset' for its own initialisation, or name a safetensors file, or a folder of them"
            )
        return None
    _refuse_quantised(model, init)
    if referenced := [name for name, parameter in on_meta.items() if weakref.getweakrefs(parameter)]:
        raise UnsupportedError(
            f"somebody holds weak references to {', '.join(referenced)} (nn.LSTM, nn.GRU and nn.RNN do to their own), which "
            "cannot get memory then; build that module on the CPU, the others on meta cannot be mixed with it yet"
        )
    if init != "reset":
        return FileValues(model, init)
    if not on_meta:
        raise ConfigError("init='reset' is for a model on the meta device; this one has values, so leave init out")
    return ResetValues(model)


def _refuse_quantised(model: Module, init: Init) -> None:
    own = {name: parameter for name, parameter in model.named_parameters() if has_own_bytes(parameter)}
    unknown = [name for name, parameter in own.items() if init == "reset" or quantisation_of(parameter) is None]
    if not unknown:
        return
    what = f"{describe_own(own, unknown)}, which"
    if init == "reset":
        raise UnsupportedError(
            f"{what} no reset_parameters() quantises; name the files that a quantised model was saved to"
        )
    raise UnsupportedError(
        f"{what} init cannot give values; load the model with its values, and leave init out; or, for files that "
        "bitsandbytes has quantised, make it on meta with layers of that library"
    )


def undo(values: Values, parameters: Iterable[Parameter]) -> None:
    """Put parameters and buffers that were on meta back there, after an error."""
    values.undo()
    for parameter in parameters:
        return_to_meta(parameter)
