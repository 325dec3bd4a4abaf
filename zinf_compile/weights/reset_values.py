"""``init="reset"``: initialises a model on meta by its own initialisation, one module at a time.

It runs what building in memory would run, in the same order: a module's children, then its own ``reset_parameters()``
(or ``_reset_parameters()``, as torch names it in some modules), and, for a model with ``_init_weights(module)`` as in
transformers, that for each of its modules at the end. So the same seed gives the same numbers.
"""

import inspect
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from zinf_compile.ir.errors import ConfigError
from zinf_compile.runtime.model.full_parameters import Site, check_room, hold_full_values
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.process.ram import return_freed_memory
from zinf_compile.runtime.store.store import Store

_MARK = 0xA5  # fills tensors without values: one that still begins and ends with it was not written


class Reset(NamedTuple):
    """One call of a model's own initialisation, which initialises the tensors of ``module``."""

    module: Module
    call: Callable[[], object]
    is_tied: bool = False  # whether weights are tied by then, so that it writes to tied weights too


def resets_of(model: Module) -> list[Reset]:
    """Return the calls in the order of building in memory, as far as the built model shows it."""
    resets: list[Reset] = []
    initialized: set[Module] = set()
    for module in _children_first(model, set()):
        for name in ("reset_parameters", "_reset_parameters"):
            reset = getattr(module, name, None)
            # If a module has only children, its __init__ did not call reset_parameters, which then is for restarting.
            if callable(reset) and (name.startswith("_") or _own_tensors(module)):
                resets.append(Reset(module, reset))
                break
        initialize = getattr(module, "_init_weights", None)
        if not callable(initialize) or not _takes_one_argument(initialize):
            continue
        # transformers: each module once, by the innermost model, which ties weights afterwards. Others ``apply`` it
        # last.
        is_pretrained = hasattr(module, "_initialize_weights")
        for part in _children_first(module, set()):
            if not is_pretrained or part not in initialized:
                resets.append(Reset(part, partial(initialize, part), is_tied=not is_pretrained))
            if is_pretrained:
                initialized.add(part)
    return resets


def _takes_one_argument(function: Callable[..., object]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return len([each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]) == 1


def _children_first(module: Module, seen: set[Module]) -> Iterator[Module]:
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _own_tensors(module: Module) -> list[Tensor]:
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


class MetaBuffers:
    """The meta buffers of a model. They get memory, then values; ``undo`` restores them."""

    def __init__(self, model: Module) -> None:
        self._names = {
            (module, name): f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta
        }
        self._was = {(module, name): module._buffers[name] for module, name in self._names}
        self._memory: dict[tuple[Module, str], Tensor] = {}

    def names(self, *, persistent: bool | None = None) -> dict[str, Module]:
        """Return the modules of these buffers by buffer name: of all, or only of persistent or non-persistent ones."""
        return {
            label: module
            for (module, name), label in self._names.items()
            if persistent is None or persistent is (name not in module._non_persistent_buffers_set)
        }

    def give_memory(self, module: Module) -> None:
        """Allocate uninitialised memory for the buffers of one module that are still on meta."""
        for key, was in self._was.items():
            if key[0] is module and was is not None and module._buffers.get(key[1]) is was:
                self._memory[key] = module._buffers[key[1]] = _mark(torch.empty_like(was, device="cpu"))

    def without_value(self) -> list[str]:
        """Return the names of buffers that were neither written nor replaced."""
        without = []
        for (module, name), label in self._names.items():
            now = module._buffers.get(name)
            is_ours = now is self._memory.get((module, name))
            if now is not None and (now.is_meta or (is_ours and _is_unwritten(now))):
                without.append(label)
        return without

    def undo(self) -> None:
        """Put all of them back on meta."""
        for (module, name), was in self._was.items():
            module._buffers[name] = was


class ResetValues:
    """First values by the model's own initialisation; ConfigError, before anything moves, if that leaves some out."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._resets = resets_of(model)
        self._buffers = MetaBuffers(model)
        able = {reset.module for reset in self._resets}
        unable = [
            name for name, _ in model.named_parameters() if model.get_submodule(name.rpartition(".")[0]) not in able
        ]
        _refuse(model, [*unable, *(name for name, module in self._buffers.names().items() if module not in able)])

    def fill(self, store: Store) -> None:
        """Run it, and store the values. ConfigError for tensors that have none afterwards."""
        records = list(store.records.values())
        versions = {record.name: record.version for record in records}  # of parameters without a value yet
        paths = {module: path for path, module in self._model.named_modules()}
        with torch.no_grad():
            for reset in self._resets:
                self._buffers.give_memory(reset.module)
                _run(reset, paths[reset.module], store, versions)
        # What a module did not write, its parent may have written in the store.
        without = [
            record.name
            for record in records
            if versions.get(record.name) == record.version and not record.copies.is_exposed
        ]
        _refuse(self._model, [*without, *self._buffers.without_value()])

    def undo(self) -> None:
        """Put buffers back on meta."""
        self._buffers.undo()


def _run(reset: Reset, path: str, store: Store, versions: dict[str, int]) -> None:
    """Run one call on full values in memory; parameters that it initialises are removed from ``versions``."""
    mine, others = _own_sites(reset, path)
    check_room(store, [site.record for site in mine], f"initialising '{path}'")
    unread = frozenset(site.record.name for site in mine if versions.get(site.record.name) == site.record.version)
    with scratch(others), hold_full_values(mine, unread=unread, in_original_dtype=True) as full:
        for name in unread:
            _mark(full[name].data)
        before = {name: full[name]._version for name in unread}
        reset.call()
        written = {name for name in unread if full[name]._version > before[name] or not _is_unwritten(full[name].data)}
    full.clear()
    return_freed_memory()  # the system's allocator would keep the memory of the largest module
    for name in unread - written:
        versions[name] = store.records[name].version
    for name in written:
        del versions[name]


def reset_buffers(model: Module, buffers: MetaBuffers, modules: Container[Module]) -> None:
    """Let some modules initialise their buffers, without changing parameters or torch's random state."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for module, call, _ in resets_of(model):
            if module in modules:
                buffers.give_memory(module)
                with scratch(
                    [(module, name) for name, parameter in module._parameters.items() if parameter is not None]
                ):
                    call()


@contextmanager
def scratch(sites: Iterable[tuple[Module, str]]) -> Iterator[None]:
    """Temporarily register scratch tensors in place of parameters.

    A second user of a tied parameter draws numbers for it too, as building in memory did before it tied the two.
    """
    was = [(module, name, module._parameters[name]) for module, name in sites]
    try:
        for module, name, parameter in was:
            assert parameter is not None
            record = record_of(parameter)
            dtype = parameter.dtype if record is None else record.original_dtype
            memory = torch.empty(parameter.shape, dtype=dtype)
            module._parameters[name] = Parameter(memory, parameter.requires_grad)
        yield
    finally:
        for module, name, parameter in was:
            module._parameters[name] = parameter


def _own_sites(reset: Reset, path: str) -> tuple[list[Site], list[tuple[Module, str]]]:
    """Return the parameters of a module that a call writes to, and those that belong to another module by tying."""
    module, mine, others = reset.module, [], []
    for name, parameter in module._parameters.items():
        if (record := record_of(parameter)) is not None:
            if reset.is_tied or record.name == (f"{path}.{name}" if path else name):
                mine.append(Site(module, name, record))
            else:
                others.append((module, name))
    return mine, others


def _mark(tensor: Tensor) -> Tensor:
    tensor.view(-1).view(torch.uint8).fill_(_MARK)
    return tensor


def _is_unwritten(tensor: Tensor) -> bool:
    ends = tensor.detach().view(-1).view(torch.uint8)[[0, -1]] if tensor.numel() else torch.empty(0)
    return bool((ends == _MARK).all())


def _refuse(model: Module, names: list[str]) -> None:
    if names:
        raise ConfigError(
            f"nothing in {type(model).__name__} gives a value to {', '.join(names)}, which are on meta; let the modules "
            "they belong to have a reset_parameters() that writes them, build those modules on the CPU, or load a file"
        )
