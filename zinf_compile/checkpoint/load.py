"""``load``: restores a model and its optimizer from a folder that ``save`` wrote, after verifying all of it."""

import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from zinf_compile.checkpoint.arguments import check_arguments, file_staging, resting
from zinf_compile.checkpoint.checkpoint_folder import (
    GRADIENTS,
    MODEL,
    OBJECTS,
    OPTIMIZER,
    Manifest,
    SavedTensor,
    locked,
    read_manifest,
)
from zinf_compile.checkpoint.match import check_same, is_remote, split_state_name
from zinf_compile.checkpoint.objects import Objects, check_options, load_objects, set_random_states
from zinf_compile.checkpoint.on_ranks import read_tensor, share_of
from zinf_compile.ir.copies import Blocks
from zinf_compile.ir.errors import CheckpointError, ConfigError
from zinf_compile.ir.glossary import dtype_name
from zinf_compile.ir.user_files import read_regular
from zinf_compile.runtime.model.model_state import (
    HomedTensor,
    add_gradient,
    add_state,
    is_divided,
    model_tensors,
    modules_with_state,
    ranks_of,
    records_in,
    remove_gradient,
    stores_of,
    tied_names,
)
from zinf_compile.runtime.params.coded_state import coded_home
from zinf_compile.runtime.params.remote import RemoteParameter
from zinf_compile.runtime.process.interrupts import without_interrupts
from zinf_compile.runtime.ranks.ranks import Ranks
from zinf_compile.runtime.storage.file_stream import FileReader
from zinf_compile.runtime.storage.safetensors_file import TensorSpan, read_layout
from zinf_compile.runtime.storage.slots import torch_dtype
from zinf_compile.runtime.storage.staging import StagingPool
from zinf_compile.runtime.transfer.slot_stream import read_slot

_log = logging.getLogger(__name__)


@without_interrupts
def load(folder: str | os.PathLike[str], model: Module, optimizer: Optimizer | None = None) -> Any:
    """Load what ``save`` wrote into a model and an optimizer of the same kind; return the ``extra`` that was saved.

    The model may be optimized with other budgets than the saved one, or not at all. torch's CPU random state is
    restored too. A model that was stopped by an earlier error can be used again. If budgets force other tiles than the
    saving run had, later results agree to rounding only, and a warning is logged.

    Raises ConfigError, with every difference, for a checkpoint of another model or optimizer; CheckpointError, with the
    file and the tensor, for a damaged one; StoreError for a closed model. Nothing has changed then. If bytes that were
    verified cannot be read a second time, the model is partly loaded, and an optimized model then refuses to be used.
    """
    folder, model = Path(folder), check_arguments(model, optimizer)
    with resting(stores_of(model)) as stores, ExitStack() as reading:
        ranks = ranks_of(model)

        def check() -> tuple[Objects, dict[Path, list[StoredTensor]]]:
            if not folder.is_dir():
                raise ConfigError(f"there is no checkpoint in '{folder}': it is no folder; save one first")
            reading.enter_context(locked(folder, exclusive=False))
            return _check_all(folder, model, optimizer, ranks, file_staging(stores))

        objects, files = ranks.do_alike("checking a checkpoint", check)
        _set_module_states(objects, model)
        try:
            with ExitStack() as stack:
                for store in stores:
                    stack.enter_context(store.rewriting(records_in(store, model)))
                _set_objects(objects, model, optimizer)
                targets = _targets(model, optimizer)
                parameters = dict(model.named_parameters(remove_duplicate=False))
                for path, tensors in files.items():
                    if is_divided(model):
                        for tensor in tensors:
                            read_tensor(path, tensor.span, tensor.saved.code, targets[path.name](tensor.saved))
                        continue
                    for run in _runs_here(tensors, parameters):
                        _fill(path, run, targets[path.name], file_staging(stores))
        except BaseException as error:
            ranks.fail(f"loading a checkpoint broke off: {error}")
            error.add_note("zinf_compile: a part of the checkpoint was loaded already; load it, or another one, again")
            raise
        _show_remote_gradients(model, files)
        set_random_states(objects, model)
        for store in stores:
            store.cuts.resume(objects.cuts)
        _log_conversions(model, optimizer, files)
        return objects.extra


def _check_all(
    folder: Path, model: Module, optimizer: Optimizer | None, ranks: Ranks, staging: StagingPool
) -> "tuple[Objects, dict[Path, list[StoredTensor]]]":
    """Return the content of a checkpoint after verifying all of it; each of several ranks reads a share of the files."""
    manifest, objects, files = read_checkpoint(folder)
    check_same(folder, manifest, objects, model, optimizer)
    if optimizer is not None:
        check_options(objects, optimizer, folder / manifest.data_folder / OBJECTS)
    verify_share(files, ranks.mesh_rank, ranks.mesh_size, staging)
    return objects, files


def read_checkpoint(folder: Path) -> "tuple[Manifest, Objects, dict[Path, list[StoredTensor]]]":
    """Return what a checkpoint has, and where: all but the bytes of its tensors, which are not verified yet."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise ConfigError(f"there is no checkpoint in '{folder}': it has no manifest; save one first")
    data = folder / manifest.data_folder
    if data.is_symlink():
        raise CheckpointError(f"{data} is a symbolic link, which is not followed; give load the folder that was saved")
    return manifest, _read_objects(data / OBJECTS, manifest), _find_tensors(data, manifest)


def verify_share(
    files: "Mapping[Path, Sequence[StoredTensor]]", rank: int, num_ranks: int, staging: StagingPool
) -> None:
    """Verify the checksums of the tensors that one of several ranks answers for; CheckpointError for a wrong one."""
    for path, tensors in files.items():
        _verify(path, share_of(tensors, rank, num_ranks), staging)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where the bytes of a tensor are in a file, and what the manifest says of it."""

    span: TensorSpan
    saved: SavedTensor


_Targets = Callable[[SavedTensor], HomedTensor]


def _read_objects(path: Path, manifest: Manifest) -> Objects:
    try:
        content = read_regular(path, follow=False)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; load another checkpoint") from error
    if zlib.crc32(content) != manifest.objects_crc32:
        raise CheckpointError(f"{path} is damaged: its checksum is wrong; load another checkpoint")
    return load_objects(content, path)


def _find_tensors(data: Path, manifest: Manifest) -> dict[Path, list[StoredTensor]]:
    """Return the tensors of each file; CheckpointError for a file that is not what the manifest says."""
    files: dict[Path, list[StoredTensor]] = {}
    for file in dict.fromkeys(tensor.file for tensor in manifest.tensors):
        path = data / file
        spans = read_layout(path, follow=False).spans
        expected = [tensor for tensor in manifest.tensors if tensor.file == file]
        forms = [(span.name, (dtype_name(span.dtype), span.shape)) for span in spans]
        if file not in (MODEL, OPTIMIZER, GRADIENTS) or forms != [(saved.name, saved.form) for saved in expected]:
            raise CheckpointError(
                f"{path} is damaged: it does not hold what the manifest says; load another checkpoint"
            )
        files[path] = [StoredTensor(span=span, saved=saved) for span, saved in zip(spans, expected, strict=True)]
    return files


def _verify(path: Path, tensors: Sequence[StoredTensor], staging: StagingPool) -> None:
    """Read some tensors of a file, which lie side by side, and compare their checksums."""
    if not tensors:
        return
    with FileReader(str(path), staging, start=tensors[0].span.start, stop=_end_of(tensors[-1])) as reader:
        for tensor in tensors:
            checksum = 0
            for piece in reader.take(tensor.span.nbytes):
                checksum = zlib.crc32(piece, checksum)
            _check(path, tensor, checksum)


def _end_of(tensor: StoredTensor) -> int:
    return tensor.span.start + tensor.span.nbytes


def _check(path: Path, tensor: StoredTensor, checksum: int) -> None:
    if checksum != tensor.saved.crc32:
        raise CheckpointError(
            f"{path} is damaged: the checksum of '{tensor.span.name}' is {checksum:08x} and should be "
            f"{tensor.saved.crc32:08x}; load another checkpoint"
        )


def _set_module_states(objects: Objects, model: Module) -> None:
    """Set the extra state of modules. If one rejects its state, all keep what they had."""
    modules = modules_with_state(model)
    before = {path: module.get_extra_state() for path, module in modules.items()}
    try:
        for path, module in modules.items():
            module.set_extra_state(objects.modules[path])
    except BaseException:
        for path, module in modules.items():
            module.set_extra_state(before[path])
        raise


def _set_objects(objects: Objects, model: Module, optimizer: Optimizer | None) -> None:
    """Set everything that is not a tensor, and remove existing gradients and optimizer state."""
    for name, parameter in model.named_parameters():
        remove_gradient(parameter)
        if optimizer is not None:
            optimizer.state.pop(parameter, None)
            if name in objects.states:
                optimizer.state[parameter] = (
                    {} if isinstance(parameter, RemoteParameter) else dict(objects.states[name])
                )
    if optimizer is not None:
        for group, options in zip(optimizer.param_groups, objects.options, strict=True):
            group.update(options)


def _show_remote_gradients(model: Module, files: Mapping[Path, Iterable[StoredTensor]]) -> None:
    """Let parameters of other ranks show which of them have gradients now."""
    pending = {tensor.saved.name for path, tensors in files.items() if path.name == GRADIENTS for tensor in tensors}
    for store in stores_of(model):
        if store.elsewhere is not None:
            store.elsewhere.norms.clear()
    for name, parameter in model.named_parameters():
        if isinstance(parameter, RemoteParameter) and name in pending:
            parameter.note_gradient()


def _targets(model: Module, optimizer: Optimizer | None) -> dict[str, _Targets]:
    """Return, for each file, the targets of its tensors."""
    parameters, tensors, tied = dict(model.named_parameters()), model_tensors(model), tied_names(model)

    def state(saved: SavedTensor) -> HomedTensor:
        name, key = split_state_name(saved.name)
        assert optimizer is not None
        return add_state(optimizer, parameters[name], key, saved.shape, torch_dtype(saved.dtype), code=saved.code)

    return {
        MODEL: lambda saved: tensors[tied.get(saved.name, saved.name)],
        OPTIMIZER: state,
        GRADIENTS: lambda saved: add_gradient(parameters[saved.name]),
    }


def _runs_here(tensors: Iterable[StoredTensor], parameters: Mapping[str, Parameter]) -> Iterator[list[StoredTensor]]:
    """Yield the tensors of a file that this process has, in runs that lie side by side."""
    for of_other, run in groupby(tensors, lambda each: is_remote(each.saved.file, each.saved.name, parameters)):
        if not of_other:
            yield list(run)


def _fill(path: Path, tensors: Sequence[StoredTensor], target: _Targets, staging: StagingPool) -> None:
    """Read tensors of a file again, which lie side by side, into their targets."""
    with FileReader(str(path), staging, start=tensors[0].span.start, stop=_end_of(tensors[-1])) as reader:
        for tensor in tensors:
            homed = target(tensor.saved)
            checksum = read_slot(reader, homed.slot, homed.tensor_io, code=tensor.saved.code, compute=homed.compute)
            _check(path, tensor, checksum)
            if homed.note_filled is not None:
                homed.note_filled()
            elif homed.tensor_io is None:
                torch.autograd.graph.increment_version(homed.slot.tensor)


def _log_conversions(model: Module, optimizer: Optimizer | None, files: Mapping[Path, Iterable[StoredTensor]]) -> None:
    """Say which optimizer state is kept in another encoding than the checkpoint has it in."""
    parameters, converted = dict(model.named_parameters()), Counter[tuple[str, str]]()
    for tensor in (tensor for path, tensors in files.items() if path.name == OPTIMIZER for tensor in tensors):
        if is_remote(OPTIMIZER, tensor.saved.name, parameters):
            continue
        name, key = split_state_name(tensor.saved.name)
        assert optimizer is not None
        value = optimizer.state[parameters[name]][key]
        shown = coded_home(value)
        code = None if shown is None else shown.coded.code
        if code != tensor.saved.code and not isinstance(tensor.saved.code, Blocks):
            converted[str(tensor.saved.code or tensor.saved.dtype), str(code or tensor.saved.dtype)] += 1
    for (there, here), count in converted.items():
        _log.info("%d tensors of optimizer state were saved as %s and are %s here: converted", count, there, here)
