"""``load``: a model and its optimizer from a folder that ``save`` wrote. All of it is checked before anything changes."""

import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from zinf_compile.checkpoint.arguments import check_arguments, file_staging, resting
from zinf_compile.checkpoint.match import check_same, split_state_name
from zinf_compile.checkpoint.objects import Objects, load_objects, set_random_states
from zinf_compile.errors import CheckpointError, ConfigError
from zinf_compile.runtime.checkpoint_folder import (
    GRADIENTS,
    MODEL,
    OBJECTS,
    OPTIMIZER,
    Manifest,
    locked,
    read_manifest,
)
from zinf_compile.runtime.file_stream import FileReader
from zinf_compile.runtime.model_state import (
    HomedTensor,
    add_gradient,
    add_state,
    model_tensors,
    modules_with_state,
    records_in,
    remove_gradient,
    stores_of,
)
from zinf_compile.runtime.safetensors_file import TensorSpan, read_layout
from zinf_compile.runtime.slot_stream import read_slot
from zinf_compile.runtime.staging import StagingPool
from zinf_compile.terms import dtype_name


def load(folder: str | os.PathLike[str], model: Module, optimizer: Optimizer | None = None) -> Any:
    """Load what ``save`` wrote into a model and an optimizer of the same kind; return the ``extra`` it was given.

    The model may be optimized with other budgets than the one that was saved, or not at all. torch's CPU random state is
    set as well. A model that an earlier error stopped goes on afterwards, as from the checkpoint.

    Raises ConfigError, with every difference, for a checkpoint of another model or optimizer; CheckpointError, with the
    file and the tensor, for one that is damaged; StoreError for a model that was closed. Nothing has changed then. When
    bytes that were whole at first cannot be read again, a part is loaded: an optimized model then refuses to be used.
    """
    folder, model = Path(folder), check_arguments(model, optimizer)
    if not folder.is_dir():
        raise ConfigError(f"there is no checkpoint in '{folder}': it is no folder; save one first")
    with resting(stores_of(model)) as stores, locked(folder, exclusive=False):
        manifest = read_manifest(folder)
        if manifest is None:
            raise ConfigError(f"there is no checkpoint in '{folder}': it has no manifest; save one first")
        data = folder / manifest.data_folder
        objects = _read_objects(data / OBJECTS, manifest)
        check_same(folder, manifest, objects, model, optimizer)
        staging = file_staging(stores)
        files = _find_tensors(data, manifest)
        for path, tensors in files.items():
            _verify(path, tensors, staging)
        try:
            with ExitStack() as stack:
                for store in stores:
                    stack.enter_context(store.rewriting(records_in(store, model)))
                _set_objects(objects, model, optimizer)
                targets = _targets(model, optimizer)
                for path, tensors in files.items():
                    _fill(path, tensors, targets[path.name], staging)
        except BaseException as error:
            error.add_note("zinf_compile: a part of the checkpoint was loaded already; load it, or another one, again")
            raise
        set_random_states(objects, model)
        return objects.extra


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredTensor:
    """A tensor in a file, and the checksum of its bytes."""

    span: TensorSpan
    crc32: int


_Targets = Callable[[TensorSpan], HomedTensor]


def _read_objects(path: Path, manifest: Manifest) -> Objects:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; load another checkpoint") from error
    if zlib.crc32(content) != manifest.objects_crc32:
        raise CheckpointError(f"{path} is damaged: its checksum is wrong; load another checkpoint")
    return load_objects(content, path)


def _find_tensors(data: Path, manifest: Manifest) -> dict[Path, list[_StoredTensor]]:
    """Return the tensors of each file; CheckpointError for a file that is not what the manifest says."""
    files: dict[Path, list[_StoredTensor]] = {}
    for file in dict.fromkeys(tensor.file for tensor in manifest.tensors):
        path = data / file
        spans = read_layout(path).spans
        expected = [tensor for tensor in manifest.tensors if tensor.file == file]
        forms = [(span.name, dtype_name(span.dtype), span.shape) for span in spans]
        if file not in (MODEL, OPTIMIZER, GRADIENTS) or forms != [
            (saved.name, saved.dtype, saved.shape) for saved in expected
        ]:
            raise CheckpointError(
                f"{path} is damaged: it does not hold what the manifest says; load another checkpoint"
            )
        files[path] = [_StoredTensor(span=span, crc32=saved.crc32) for span, saved in zip(spans, expected, strict=True)]
    return files


def _verify(path: Path, tensors: Sequence[_StoredTensor], staging: StagingPool) -> None:
    """Read a file once and compare the checksum of every tensor."""
    with FileReader(str(path), staging, start=tensors[0].span.start) as reader:
        for tensor in tensors:
            checksum = 0
            for piece in reader.take(tensor.span.nbytes):
                checksum = zlib.crc32(piece, checksum)
            _check(path, tensor, checksum)


def _check(path: Path, tensor: _StoredTensor, checksum: int) -> None:
    if checksum != tensor.crc32:
        raise CheckpointError(
            f"{path} is damaged: the checksum of '{tensor.span.name}' is {checksum:08x} and should be {tensor.crc32:08x}; "
            "load another checkpoint"
        )


def _set_objects(objects: Objects, model: Module, optimizer: Optimizer | None) -> None:
    """Set what is no tensor, and take away the gradients and the optimizer state there were."""
    for path, module in modules_with_state(model).items():
        module.set_extra_state(objects.modules[path])
    for name, parameter in model.named_parameters():
        remove_gradient(parameter)
        if optimizer is not None:
            optimizer.state.pop(parameter, None)
            if name in objects.states:
                optimizer.state[parameter] = dict(objects.states[name])
    if optimizer is not None:
        for group, options in zip(optimizer.param_groups, objects.options, strict=True):
            group.update(options)


def _targets(model: Module, optimizer: Optimizer | None) -> dict[str, _Targets]:
    """Return, for each file, where a tensor of it goes."""
    parameters, tensors = dict(model.named_parameters()), model_tensors(model)

    def state(span: TensorSpan) -> HomedTensor:
        name, key = split_state_name(span.name)
        assert optimizer is not None
        return add_state(optimizer, parameters[name], key, span.shape, span.dtype)

    return {
        MODEL: lambda span: tensors[span.name],
        OPTIMIZER: state,
        GRADIENTS: lambda span: add_gradient(parameters[span.name]),
    }


def _fill(path: Path, tensors: Sequence[_StoredTensor], target: _Targets, staging: StagingPool) -> None:
    """Read a file again, into the homes of its tensors."""
    with FileReader(str(path), staging, start=tensors[0].span.start) as reader:
        for tensor in tensors:
            homed = target(tensor.span)
            _check(path, tensor, read_slot(reader, homed.slot, homed.transfers, compute=homed.compute))
            if homed.transfers is None:
                torch.autograd.graph.increment_version(homed.slot.tensor)
