"""Compares a checkpoint with a model and an optimizer, and lists every difference before anything changes."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from zinf_compile.checkpoint.checkpoint_folder import GRADIENTS, MODEL, OPTIMIZER, Manifest
from zinf_compile.checkpoint.objects import Objects
from zinf_compile.ir.copies import Blocks
from zinf_compile.ir.errors import ConfigError, UnsupportedError
from zinf_compile.runtime.model.model_state import (
    gradient_dtype,
    is_divided,
    model_tensors,
    modules_with_state,
    tied_names,
)
from zinf_compile.runtime.optim.block_wise import is_block_wise
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.params.remote import RemoteParameter

_OF_BITSANDBYTES = {"state1", "state2"}  # keys of its optimizers, some of which torchao's have the names of


def group_names(model: Module, optimizer: Optimizer | None) -> tuple[tuple[str, ...], ...]:
    """Return the names of the parameters in each group; ConfigError for a parameter that is not the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optimizer.param_groups if optimizer is not None else []
    strange = [parameter for group in groups for parameter in group["params"] if id(parameter) not in names]
    for parameter in strange:
        if (record := record_of(parameter)) is not None and record.copies.seat.is_held:
            raise UnsupportedError(
                f"'{record.name}' is held by full_parameters(), whose tensor has its value; save and load after the block"
            )
    if strange:
        raise ConfigError(
            f"{len(strange)} parameters of the optimizer are not in this {type(model).__name__}; save and load an optimizer "
            "with the whole model that it trains"
        )
    return tuple(tuple(names[id(parameter)] for parameter in group["params"]) for group in groups)


def state_name(parameter: str, key: object) -> str:
    """Return the name of a state tensor in its file: "layers.0.weight/exp_avg"."""
    if not isinstance(key, str) or "/" in key:
        raise UnsupportedError(
            f"the optimizer keeps {key!r} for '{parameter}'; its keys must be strings without a slash"
        )
    return f"{parameter}/{key}"


def split_state_name(name: str) -> tuple[str, str]:
    """Return the parameter and the key of a state tensor."""
    parameter, _, key = name.rpartition("/")
    return parameter, key


def parameter_of(file: str, name: str) -> str:
    """Return the parameter that a tensor of a file belongs to; of a buffer, its own name."""
    return split_state_name(name)[0] if file == OPTIMIZER else name


def is_remote(file: str, name: str, parameters: Mapping[str, Parameter]) -> bool:
    """Return whether another rank has a tensor of a file, as ranks do that work in rounds."""
    return isinstance(parameters.get(parameter_of(file, name)), RemoteParameter)


def check_same(where: Path, manifest: Manifest, objects: Objects, model: Module, optimizer: Optimizer | None) -> None:
    """Raise ConfigError, listing every difference, unless a checkpoint matches this model and optimizer.

    Each of several ranks compares the shapes and dtypes of what it has.
    """
    if manifest.optimizer is not None and optimizer is None:
        raise ConfigError(
            f"the checkpoint in '{where}' holds the state of {manifest.optimizer}: give the optimizer as well, "
            "load(folder, model, optimizer)"
        )
    if manifest.optimizer is None and optimizer is not None:
        raise ConfigError(f"the checkpoint in '{where}' was saved without an optimizer: load it by load(folder, model)")
    differences = [*_model_differences(manifest, objects, model), *_gradient_differences(manifest, model)]
    if optimizer is not None:
        differences += _optimizer_differences(manifest, objects, model, optimizer)
    if differences:
        raise ConfigError(
            f"the checkpoint in '{where}' is not one of this {type(model).__name__} and its optimizer; nothing was "
            f"loaded. {len(differences)} differences:",
            *differences,
        )


def _model_differences(manifest: Manifest, objects: Objects, model: Module) -> Iterator[str]:
    here = {name: _form(tensor.shape, tensor.slot.tensor.dtype) for name, tensor in model_tensors(model).items()}
    there = _saved_forms(manifest, MODEL)
    # Checkpoints of torch.distributed.checkpoint have a tied parameter by each of its names.
    here |= {name: here[kept] for name, kept in tied_names(model).items() if name in there and kept in here}
    everywhere = dict(model.named_parameters(remove_duplicate=False))
    yield from (f"missing in the checkpoint: '{name}', {here[name]}" for name in here if name not in there)
    yield from (
        f"not in this model: '{name}', {there[name]}"
        for name in there
        if name not in here and not is_remote(MODEL, name, everywhere)
    )
    yield from _changed(here, there)
    modules = set(modules_with_state(model))
    yield from (
        f"missing in the checkpoint: extra state of '{path}'" for path in sorted(modules - set(objects.modules))
    )
    yield from (f"not in this model: extra state of '{path}'" for path in sorted(set(objects.modules) - modules))


def _gradient_differences(manifest: Manifest, model: Module) -> Iterator[str]:
    parameters, tensors = dict(model.named_parameters()), model_tensors(model)
    there = _saved_forms(manifest, GRADIENTS)
    here = {}
    for name in there:
        if is_remote(GRADIENTS, name, parameters):
            continue
        dtype = gradient_dtype(parameters[name]) if name in parameters else None
        if dtype is not None:
            here[name] = _form(tensors[name].shape, dtype)
        elif name in parameters:
            yield f"has a gradient in the checkpoint, and is frozen in this model: '{name}'"
        else:
            yield f"has a gradient in the checkpoint, and is not in this model: '{name}'"
    yield from _changed(here, there, "the gradient of ")


def _optimizer_differences(manifest: Manifest, objects: Objects, model: Module, optimizer: Optimizer) -> Iterator[str]:
    name = type(optimizer).__qualname__
    if name != manifest.optimizer:
        yield f"the optimizer is {manifest.optimizer} in the checkpoint, {name} here"
    coded = [tensor for tensor in manifest.tensors if isinstance(tensor.code, Blocks)]
    if coded and not is_block_wise(optimizer):
        yield f"state in torchao's codes in the checkpoint, such as '{coded[0].name}', and {name} here is not torchao's"
    of_others = [name for name in _saved_forms(manifest, OPTIMIZER) if split_state_name(name)[1] in _OF_BITSANDBYTES]
    if of_others and is_block_wise(optimizer):
        yield f"state of bitsandbytes in the checkpoint, such as '{of_others[0]}', and {name} here is torchao's"
    if coded and is_divided(model):
        yield f"state in torchao's codes in the checkpoint, such as '{coded[0].name}', which is for one process"
    here, there = group_names(model, optimizer), manifest.groups
    if len(here) != len(there) or len(objects.options) != len(there):
        yield f"{len(there)} parameter groups in the checkpoint, {len(here)} here"
        return
    for index, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        more, less = [name for name in theirs if name not in ours], [name for name in ours if name not in theirs]
        yield from (f"in parameter group {index} of the checkpoint, and not here: '{name}'" for name in more)
        yield from (f"in parameter group {index} here, and not in the checkpoint: '{name}'" for name in less)
        if not more and not less and ours != theirs:
            yield f"parameter group {index} has the same parameters in another order"
    known = {name for names in here for name in names}
    owners = {split_state_name(name)[0] for name in _saved_forms(manifest, OPTIMIZER)} | set(objects.states)
    yield from (f"state for a parameter that is in no group here: '{name}'" for name in sorted(owners - known))


def _form(shape: Sequence[int], dtype: object) -> str:
    """Return a tensor's shape and dtype as text: "(4, 3) float32"."""
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"


def _saved_forms(manifest: Manifest, file: str) -> dict[str, str]:
    return {tensor.name: _form(tensor.shape, tensor.dtype) for tensor in manifest.tensors if tensor.file == file}


def _changed(here: Mapping[str, str], there: Mapping[str, str], what: str = "") -> Iterator[str]:
    for name in here:
        if there.get(name, here[name]) != here[name]:
            yield f"{what}'{name}' is {there[name]} in the checkpoint, {here[name]} here"
