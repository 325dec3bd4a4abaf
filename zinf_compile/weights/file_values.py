"""``init="model.safetensors"``: streams a model's values from files, a piece at a time."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from zinf_compile.ir.errors import CheckpointError, ConfigError
from zinf_compile.runtime.params.full_values import copy_rows, end_writes, write_piece
from zinf_compile.runtime.storage.nvme.weight_file import WeightFile, WeightSpan
from zinf_compile.runtime.storage.safetensors_file import TensorSpan, read_layout
from zinf_compile.runtime.store.store import Store
from zinf_compile.weights.quantised_files import (
    QuantisedOnMeta,
    find_saved,
    match_quantised,
    quantisation_of,
    statistics_of,
)
from zinf_compile.weights.reset_values import MetaBuffers, reset_buffers, resets_of
from zinf_compile.weights.weight_files import FileTensor, Source, find_tensors, read_tensors


class FileValues:
    """The values for a model in files. Checked before anything moves; ConfigError lists everything that does not match."""

    def __init__(self, model: Module, source: Source) -> None:
        self._model = model
        self._buffers = MetaBuffers(model)
        self._parameters: dict[str, FileTensor] = {}  # by the parameter's name in the store
        self._weights: dict[str, WeightSpan] = {}  # of frozen ones that may be in place
        self._persistent: dict[str, FileTensor] = {}
        self._quantised: list[QuantisedOnMeta] = []
        self._shown: dict[int, FileTensor] = {}  # what quantised parameters consist of, by address
        self._components: set[str] = set()  # those of ``self._parameters`` that are components of quantised ones
        self._recomputed = self._buffers.names(persistent=False)
        found = find_tensors(source)
        problems: list[str] = []
        statistics: set[str] = set()
        for names, tensor in _named_tensors(model):
            here = [name for name in names if name in found]
            if not here:
                problems.append(f"'{names[0]}' is missing")
                continue
            saved, is_quantised = find_saved(here[-1], found), quantisation_of(tensor) is not None
            if saved is not None or is_quantised:
                statistics |= statistics_of(here[-1], found)
            if is_quantised:
                tensors, unfit = match_quantised(here[-1], tensor, found)
                problems += unfit
                module = model.get_submodule(names[0].rpartition(".")[0])
                assert isinstance(tensor, Parameter)
                self._quantised.append(QuantisedOnMeta(module=module, parameter=tensor, tensors=tensors))
                continue
            if saved is not None:
                problems.append(
                    f"'{here[-1]}' is {saved} of bitsandbytes in {found[here[-1]].path.name}, and not quantised in the model"
                    f"{_say_how()}"
                )
                continue
            # One name per tied parameter is enough. If files have several, the last one counts, as in load_state_dict.
            chosen = found[here[-1]]
            kind = self._parameters if isinstance(tensor, Parameter) else self._persistent
            kind[names[0]] = chosen
            problems += [
                f"'{name}' is {list(found[name].span.shape)} in {found[name].path.name}, {list(tensor.shape)} in the model"
                for name in here
                if found[name].span.shape != tensor.shape
            ]
        known = {name for names, _ in _named_tensors(model) for name in names}
        ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())  # patterns of transformers
        known |= {name for name, _ in model.named_buffers(remove_duplicate=False)} | statistics
        problems += [
            f"'{name}' is in {tensor.path.name}, and not in the model"
            for name, tensor in found.items()
            if name not in known and not any(re.search(pattern, name) for pattern in ignored)
        ]
        able = {reset.module for reset in resets_of(model)}
        problems += [
            f"'{name}' is on meta, and neither in a state dict nor made by a reset_parameters() of its module"
            for name, module in self._recomputed.items()
            if module not in able
        ]
        if problems:
            raise ConfigError(f"{type(model).__name__} cannot be filled from {source}:", *problems)

    @property
    def quantised(self) -> list[QuantisedOnMeta]:
        """Return the quantised parameters."""
        return self._quantised

    def show_quantised(self) -> None:
        """Let quantised parameters show the bytes of the files, in mappings that are not read. ``undo`` puts them back.

        CheckpointError for a file that cannot be opened, StoreError where the system refuses or a file cannot be read.
        """
        with ExitStack() as opened:
            files: dict[Path, WeightFile] = {}
            for path in {tensor.path for each in self._quantised for tensor in each.tensors.values()}:
                files[path] = _open(path, WeightFile)
                opened.callback(files[path].close)  # a mapping stays
            for each in self._quantised:
                self._shown |= each.show(files)

    def take_components(self, components: Mapping[str, Mapping[str, Parameter]]) -> None:
        """Give what is stored of quantised parameters its values like plain ones."""
        for own in components.values():
            for name, component in own.items():
                self._parameters[name] = self._shown[component.data_ptr()]
                self._components.add(name)

    def serve(self, store: Store) -> dict[str, WeightSpan]:
        """Return where the files have the values of frozen parameters, opened, for those that may stay there.

        CheckpointError for a file that has changed since it was looked at. Nothing with several ranks or without nvme.
        """
        if not store.ranks.is_alone or store.engine is None:
            return {}
        known: dict[WeightFile, frozenset[TensorSpan]] = {}
        for name, tensor in self._parameters.items():
            span = tensor.span
            is_frozen = name in self._components or not self._model.get_parameter(name).requires_grad
            if not is_frozen or span.nbytes == 0 or span.start % span.dtype.itemsize:
                continue
            file = _open(tensor.path, store.open_weights)
            if file not in known:
                known[file] = frozenset(read_layout(file.open_path).spans)
            if span not in known[file]:
                raise CheckpointError(f"{tensor.path} was replaced while it was read; give it once nobody writes to it")
            self._weights[name] = WeightSpan(file, span.start, span.dtype)
        return self._weights

    def fill(self, store: Store) -> None:
        """Write the values home, but for what is in place.

        StoreError when a file cannot be read, ConfigError for a buffer that gets no value.
        """
        self._recompute_buffers()  # first, since it may touch parameters
        to_read = {
            name: tensor for name, tensor in self._parameters.items() if store.records[name].copies.in_place is None
        }
        targets = {tensor.span.name: name for name, tensor in to_read.items()}
        rows = torch.empty(0)  # of several ranks: this rank's, which do not begin where pieces do
        for piece in read_tensors(to_read.values()):
            record = store.records[targets[piece.name]]
            if store.ranks.is_alone:
                write_piece(record, piece.first, piece.values)
            else:
                if piece.first == 0:
                    rows = torch.empty(record.shard.num_elements, dtype=record.original_dtype)
                copy_rows(record, piece.first, piece.values, rows)
            if piece.first + piece.values.numel() == record.shape.numel():
                if not store.ranks.is_alone:
                    write_piece(record, record.shard.flat.start, rows)
                end_writes(record)
                if store.facts[record.name].file_dtype is not None:
                    record.copies.serve(self._weights[record.name])  # a plan may move it to nvme
        self._fill_buffers()

    def _recompute_buffers(self) -> None:
        reset_buffers(self._model, self._buffers, set(self._recomputed.values()))
        if without := [name for name in self._buffers.without_value() if name in self._recomputed]:
            raise ConfigError(
                f"the reset_parameters() of their modules leaves {', '.join(without)} without a value, and they are in no "
                "state dict; write them there, or build those modules on the CPU"
            )

    def _fill_buffers(self) -> None:
        values = {
            name: torch.empty(tensor.span.shape, dtype=tensor.span.dtype) for name, tensor in self._persistent.items()
        }
        targets = {tensor.span.name: name for name, tensor in self._persistent.items()}
        for piece in read_tensors(self._persistent.values()):
            value = values[targets[piece.name]].view(-1)
            value[piece.first : piece.first + piece.values.numel()] = piece.values
        for name, value in values.items():
            path, _, last = name.rpartition(".")
            module = self._model.get_submodule(path)
            self._buffers.give_memory(module)
            with torch.no_grad():
                module.get_buffer(last).copy_(value)

    def undo(self) -> None:
        """Put buffers and quantised parameters back on meta."""
        self._buffers.undo()
        for each in self._quantised:
            each.put_back()


def _say_how() -> str:
    install = "" if find_spec("bitsandbytes") is not None else "install bitsandbytes, and "
    return (
        f": {install}make its layer a Linear4bit or Linear8bitLt of that library before optimize(), which for a model of "
        "transformers its quantizer does, or take a checkpoint that is not quantised"
    )


def _open(path: Path, opening: Callable[[str], WeightFile]) -> WeightFile:
    try:
        return opening(str(path.absolute()))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; use another copy") from error


def _named_tensors(model: Module) -> Iterator[tuple[list[str], Tensor]]:
    """Return every parameter and persistent buffer once, with all its names in module order."""
    named: dict[int, tuple[list[str], Tensor]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is not None and name not in module._non_persistent_buffers_set:
                    named.setdefault(id(tensor), ([], tensor))[0].append(f"{path}.{name}" if path else name)
    yield from named.values()
