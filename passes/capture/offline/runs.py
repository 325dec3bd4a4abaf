"""Runs of identical blocks in a model: modules of a list that differ only in their values and index.

A model is captured with shortened runs, and ``passes/analysis/repeats.py`` gives the facts of the whole.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, Sequential

from zinf_compile.passes.analysis.modules import block_of
from zinf_compile.passes.analysis.repeats import Run

_OWN = frozenset({"_modules", "_parameters", "_buffers"})
_VALUES = (bool, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice, type)


def find_runs(model: Module, *, longer_than: int) -> tuple[Run, ...]:
    """Return the runs of more than ``longer_than`` identical blocks in module order, none inside another.

    Blocks are identical if their classes, attributes, parameters and buffers differ only in values of tensors and in
    integers that count blocks. Modules that blocks share must have no parameters.
    """
    sites = Counter(_parameter_sites(model))
    runs: list[Run] = []
    for path, container in model.named_modules():
        children = list(container._modules.values())
        keys = list(container._modules)
        is_list = isinstance(container, ModuleList | Sequential) and keys == [str(index) for index in range(len(keys))]
        # The block of an op or parameter is identified by the first number in its name.
        is_first_number = block_of(f"{path}.0") == f"{path}.0" if path else True
        inside = any(path.startswith(f"{run.container}.") for run in runs if run.container)
        if not (is_list and is_first_number) or inside:
            continue
        first = 0
        while first < len(children):
            length = _run_length(children[first:], sites)
            if length > longer_than:
                runs.append(Run(container=path, first=first, num_blocks=length))
            first += length
    return tuple(runs)


def dropped_blocks(model: Module, runs: Sequence[Run], num_blocks: int) -> Iterator[Module]:
    """Yield the blocks of a model that ``shorten_runs`` takes out."""
    for run in runs:
        children = list(model.get_submodule(run.container)._modules.values())
        dropped = children[run.first + num_blocks : run.first + run.num_blocks]
        yield from (child for child in dropped if child is not None)


def shorten_runs(model: Module, runs: Sequence[Run], num_blocks: int) -> None:
    """Keep ``num_blocks`` blocks of each run, and renumber the modules after it."""
    for run in reversed(runs):
        container = model.get_submodule(run.container)
        children = list(container._modules.values())
        kept = children[: run.first + num_blocks] + children[run.first + run.num_blocks :]
        container._modules = {str(index): child for index, child in enumerate(kept)}


def _run_length(children: Sequence[Module | None], sites: Mapping[int, int]) -> int:
    """Return how many modules, from the first on, are identical and share no parameter with anything else."""
    first = children[0]
    if first is None or not _owns_all(first, sites):
        return 1
    for distance, other in enumerate(children[1:], start=1):
        if other is None or other is first or not _owns_all(other, sites) or not _are_alike(first, other, distance):
            return distance
    return len(children)


def _parameter_sites(module: Module) -> Iterator[int]:
    for _, part in module.named_modules(remove_duplicate=False):
        yield from (id(parameter) for parameter in part._parameters.values() if parameter is not None)


def _owns_all(block: Module, sites: Mapping[int, int]) -> bool:
    """Return whether the block's parameters are registered only inside the block."""
    return all(sites[parameter] == count for parameter, count in Counter(_parameter_sites(block)).items())


def _are_alike(one: Module, other: Module, distance: int) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or list(one._modules) != list(other._modules):
        return False
    tensors = ((one._parameters, other._parameters), (one._buffers, other._buffers))
    return (
        all(_is_same(left, right, distance) for left, right in tensors)
        and all(
            left is right or (left is not None and right is not None and _are_alike(left, right, distance))
            for left, right in zip(one._modules.values(), other._modules.values(), strict=True)
        )
        and _is_same(_plain(one), _plain(other), distance)
    )


def _plain(module: Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def _is_same(one: Any, other: Any, distance: int) -> bool:
    """Return whether two attributes are equal for capture; integers may differ by ``distance``, as block counts do."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return (one.shape, one.stride(), one.dtype, one.requires_grad) == (
            (other.shape, other.stride(), other.dtype, other.requires_grad)
        )
    if isinstance(one, Module):
        return _are_alike(one, other, distance)
    if isinstance(one, int) and not isinstance(one, bool):
        return other - one in (0, distance)
    if isinstance(one, _VALUES):
        return bool(one == other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and _is_same(list(one.values()), list(other.values()), distance)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(functools.partial(_is_same, distance=distance), one, other))
    if isinstance(one, set | frozenset):
        return bool(one == other)
    if isinstance(one, functools.partial):
        left, right = ((item.func, item.args, item.keywords) for item in (one, other))
        return _is_same(left, right, distance)
    return False
