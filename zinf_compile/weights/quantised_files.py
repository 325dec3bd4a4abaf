"""Quantised parameters on meta: checked against what bitsandbytes has saved of them, and made over the bytes of the files.

Of ``layer.weight`` a file has the codes, by its own name, and beside them, as ``state_dict()`` names them::

    nf4, fp4    layer.weight.absmax, .quant_map, .nested_absmax and .nested_quant_map of nested statistics,
                layer.weight.quant_state.bitsandbytes__nf4: JSON with sizes, dtypes and the offset of nested statistics
    int8        layer.SCB, layer.weight_format
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from zinf_compile.ir.errors import CheckpointError
from zinf_compile.runtime.model.quantised import LEAST_NBYTES
from zinf_compile.runtime.storage.nvme.weight_file import WeightFile
from zinf_compile.runtime.storage.slots import map_tensor
from zinf_compile.weights.weight_files import FileTensor, read_tensors

_STATE = "quant_state.bitsandbytes__"
_FOUR_BIT = ("nf4", "fp4")
_PLAIN_STATISTICS = ("absmax", "quant_map")
_NESTED_STATISTICS = ("nested_absmax", "nested_quant_map")


def quantisation_of(parameter: Tensor) -> str | None:
    """Return how bitsandbytes quantises a parameter on meta: "nf4", "fp4" or "int8"; None if it is another one."""
    kind = type(parameter).__name__
    if not parameter.is_meta or kind not in ("Params4bit", "Int8Params"):
        return None
    if kind == "Int8Params":
        return None if getattr(parameter, "has_fp16_weights", True) else "int8"
    quant_type: str = parameter.quant_type  # type: ignore[attr-defined]
    return quant_type


def find_saved(name: str, found: Mapping[str, FileTensor]) -> str | None:
    """Return how the parameter of this name was quantised by bitsandbytes when it was saved; None if it was not."""
    if name in found and found[name].span.dtype is torch.int8 and _beside(name, "SCB") in found:
        return "int8"
    return next((kind for kind in _FOUR_BIT if f"{name}.{_STATE}{kind}" in found), None)


def statistics_of(name: str, found: Mapping[str, FileTensor]) -> set[str]:
    """Return the names of what files have of a quantised parameter beside its codes."""
    inner = (*_PLAIN_STATISTICS, *_NESTED_STATISTICS, *(f"{_STATE}{kind}" for kind in _FOUR_BIT))
    names = [*(f"{name}.{each}" for each in inner), _beside(name, "SCB"), _beside(name, "weight_format")]
    return {each for each in names if each in found}


def _beside(name: str, other: str) -> str:
    path, dot, _ = name.rpartition(".")
    return f"{path}{dot}{other}"


class Matched(NamedTuple):
    """What files have of a quantised parameter, and what of it the model cannot take, each a sentence."""

    tensors: Mapping[str, FileTensor]  # by the name that bitsandbytes has for them: "weight", "absmax", ...
    problems: list[str]


def match_quantised(name: str, parameter: Tensor, found: Mapping[str, FileTensor]) -> Matched:
    """Compare a quantised parameter on meta with what files have under its name, which is there. Moves nothing."""
    wanted, saved, file = quantisation_of(parameter), find_saved(name, found), found[name].path.name
    problem = None
    if saved is None and f"{name}.absmax" not in found:
        problem = f"not quantised in {file}: quantise that model in memory and save it, or leave its layers plain"
    elif saved is not None and saved != wanted:
        problem = f"{saved} in {file}: make the model by the settings of the checkpoint"
    if problem is not None:
        return Matched({}, [f"'{name}' is {wanted} in the model, and {problem}"])
    return _match_int8(name, parameter, found) if wanted == "int8" else _match_four_bit(name, parameter, found)


def _match_int8(name: str, parameter: Tensor, found: Mapping[str, FileTensor]) -> Matched:
    tensors = {"weight": found[name], "SCB": found[_beside(name, "SCB")]}
    shape = tuple(parameter.shape)
    return Matched(tensors, _misfits(tensors, {"weight": (shape, torch.int8), "SCB": (shape[:1], torch.float32)}))


def _match_four_bit(name: str, parameter: Tensor, found: Mapping[str, FileTensor]) -> Matched:
    key = f"{_STATE}{quantisation_of(parameter)}"
    if f"{name}.{key}" not in found:
        return Matched({}, [f"'{name}.{key}' is missing"])
    state = _read_state(found[f"{name}.{key}"])
    is_nested = "nested_offset" in state
    statistics = (*_PLAIN_STATISTICS, *(_NESTED_STATISTICS if is_nested else ()), key)
    names = {"weight": name, **{each: f"{name}.{each}" for each in statistics}}
    if missing := [each for each in names.values() if each not in found]:
        return Matched({}, [f"'{each}' is missing" for each in missing])
    tensors = {each: found[where] for each, where in names.items()}
    if state["shape"] != list(parameter.shape):
        problem = f"'{name}' is {state['shape']} in {found[name].path.name}, {list(parameter.shape)} in the model"
        return Matched(tensors, [problem])
    num_blocks = -(-parameter.numel() // state["blocksize"])
    codes = tensors["weight"].span.dtype  # of the storage, with two elements a byte
    forms: dict[str, _Form] = {
        "weight": (((parameter.numel() + 1) // (2 * codes.itemsize), 1), codes),
        "absmax": ((num_blocks,), torch.uint8 if is_nested else torch.float32),
        "quant_map": ((16,), torch.float32),
    }
    if is_nested:
        forms["nested_absmax"] = (-(-num_blocks // state["nested_blocksize"]),), torch.float32
        forms["nested_quant_map"] = (256,), torch.float32
    return Matched(tensors, _misfits(tensors, forms))


_Form = tuple[tuple[int, ...], torch.dtype]


def _misfits(tensors: Mapping[str, FileTensor], forms: Mapping[str, _Form]) -> list[str]:
    """Return a sentence for each tensor of another form: kernels read what the form of the weight lets them expect."""
    return [
        f"'{tensors[key].span.name}' is {_say_form((tensors[key].span.shape, tensors[key].span.dtype))} in "
        f"{tensors[key].path.name}, and {_say_form(form)} of such a weight"
        for key, form in forms.items()
        if (tensors[key].span.shape, tensors[key].span.dtype) != form
    ]


def _say_form(form: _Form) -> str:
    return f"{list(form[0])} of {str(form[1]).removeprefix('torch.')}"


def _read_state(tensor: FileTensor) -> dict[str, Any]:
    """Return what bitsandbytes has saved as JSON. CheckpointError if that is damaged."""
    text = b"".join(bytes(piece.values.view(torch.uint8).numpy()) for piece in read_tensors([tensor]))
    try:
        state = json.loads(text)
        sizes = ("blocksize", "nested_blocksize") if "nested_offset" in state else ("blocksize",)
        dtypes = ("dtype", "nested_dtype") if "nested_offset" in state else ("dtype",)
        if not isinstance(state["shape"], list) or not all(
            isinstance(state[key], int) and state[key] > 0 for key in sizes
        ):
            raise ValueError("its sizes are none")
        if not all(isinstance(getattr(torch, state[key], None), torch.dtype) for key in dtypes):
            raise ValueError("it names no dtype")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{tensor.path} is damaged: '{tensor.span.name}' cannot be read ({error}); use another copy"
        ) from error
    return dict(state)


@dataclass(slots=True, kw_only=True)
class QuantisedOnMeta:
    """A quantised parameter on meta, to be given its form over the bytes of files, and to be put back."""

    module: Module
    parameter: Parameter
    tensors: Mapping[str, FileTensor]
    made: Parameter | None = None  # has what the parameter was, while that has its form
    was: dict[str, object] = field(default_factory=dict)  # what the library keeps beside it

    def show(self, files: Mapping[Path, WeightFile]) -> dict[int, FileTensor]:
        """Let the parameter, the same object, show the bytes of files; return where each of its tensors is, by address.

        Nothing is read but small tensors, and what does not begin at a multiple of its element.
        """
        values: dict[str, Tensor] = {}
        for key, tensor in self.tensors.items():
            span = tensor.span
            if span.nbytes < LEAST_NBYTES or span.start % span.dtype.itemsize:
                values[key] = torch.empty(span.shape, dtype=span.dtype)
                for piece in read_tensors([tensor]):
                    values[key].view(-1)[piece.first : piece.first + piece.values.numel()] = piece.values
            else:
                view = files[tensor.path].map(span.start, span.nbytes)
                values[key] = map_tensor(view, torch.Size(span.shape), span.dtype)
        shown = {value.data_ptr(): self.tensors[key] for key, value in values.items()}
        self.was = {key: getattr(self._owner, key) for key in self._kept}
        self.made = self._make(values)
        torch.utils.swap_tensors(self.parameter, self.made)
        return shown

    @property
    def _is_int8(self) -> bool:
        return "SCB" in self.tensors

    @property
    def _owner(self) -> Any:
        """Return what the library keeps some of the tensors at, beside the parameter."""
        return self.module.state if self._is_int8 else self.module

    @property
    def _kept(self) -> tuple[str, ...]:
        return ("CB", "SCB") if self._is_int8 else ("quant_state",)

    def _make(self, values: dict[str, Tensor]) -> Parameter:
        """Return the parameter as bitsandbytes makes it of a checkpoint."""
        kind: Any = type(self.parameter)
        weight = values.pop("weight")
        made: Parameter = (
            kind(weight, requires_grad=False, has_fp16_weights=False, CB=weight, SCB=values["SCB"])
            if self._is_int8
            else kind.from_prequantized(
                data=weight, quantized_stats=values, requires_grad=False, device="cpu", module=self.module
            )
        )
        return made

    def put_back(self) -> None:
        """Put the parameter back on meta, if it was shown."""
        if self.made is None:
            return
        torch.utils.swap_tensors(self.parameter, self.made)
        self.made = None
        for key, value in self.was.items():
            setattr(self._owner, key, value)
