"""The non-tensor content of a checkpoint: optimizer options, counts, random state, extra."""

import io
import pickle
import struct
import zipfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from zinf_compile.ir.errors import CheckpointError, ConfigError
from zinf_compile.runtime.model.model_state import is_divided, modules_with_state, ranks_of, stores_of
from zinf_compile.runtime.params.remote import RemoteParameter
from zinf_compile.runtime.ranks.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """Everything that torch's safe loader reads: numbers, strings, tensors, and containers of these."""

    extra: Any
    options: list[dict[str, Any]]  # of each parameter group
    states: dict[
        str, dict[str, Any]
    ]  # by parameter: what the optimizer keeps that is no tensor; for each it has state for
    modules: dict[str, Any]  # what modules with a get_extra_state() of their own hold
    random_state: Tensor  # of torch's CPU generator
    device_random_state: Tensor | None = None  # of that of the GPU that the model computes on
    rank_random_states: list[Tensor] | None = None  # of torch's CPU generator on each of the ranks that saved
    cuts: list[str] | None = None  # how graphs were cut into tiles, in words; older checkpoints do not say


class _OfRank(NamedTuple):
    """What each of several ranks has by itself."""

    states: dict[str, dict[str, Any]]
    random_state: Tensor
    cuts: list[str]


def collect_objects(model: Module, optimizer: Optimizer | None, extra: object) -> Objects:
    """Return the objects of a model and its optimizer, as far as this rank has them."""
    groups = optimizer.param_groups if optimizer is not None else []
    states = optimizer.state if optimizer is not None else {}
    return Objects(
        extra=extra,
        options=[{key: value for key, value in group.items() if key != "params"} for group in groups],
        states={
            name: {key: value for key, value in states[parameter].items() if not isinstance(value, Tensor)}
            for name, parameter in model.named_parameters()
            if parameter in states and not isinstance(parameter, RemoteParameter)
        },
        modules={path: module.get_extra_state() for path, module in modules_with_state(model).items()},
        random_state=torch.get_rng_state(),
        device_random_state=torch.cuda.get_rng_state(gpu) if (gpu := _gpu_of(model)) is not None else None,
        cuts=[way for store in stores_of(model) for way in store.cuts.ways],
    )


def join_objects(objects: Objects, model: Module, ranks: Ranks) -> Objects:
    """Return the objects of all ranks, which call this at the same time."""
    assert objects.cuts is not None
    mine = _OfRank({} if is_divided(model) else objects.states, objects.random_state, objects.cuts)
    given = ranks.exchange("the objects of a checkpoint", mine)
    states = {name: state for each in given for name, state in each.states.items()}
    return replace(
        objects,
        states=objects.states
        if is_divided(model)
        else {name: states[name] for name, _ in model.named_parameters() if name in states},
        rank_random_states=[each.random_state for each in given],
        cuts=list(dict.fromkeys(cut for each in given for cut in each.cuts)),
    )


def set_random_states(objects: Objects, model: Module) -> None:
    """Restore the random states of the checkpoint, on the host and on the model's GPU."""
    ranks, states = ranks_of(model), objects.rank_random_states
    is_same_world = states is not None and len(states) == ranks.mesh_size
    torch.set_rng_state(states[ranks.mesh_rank] if states is not None and is_same_world else objects.random_state)
    if objects.device_random_state is not None and (gpu := _gpu_of(model)) is not None:
        torch.cuda.set_rng_state(objects.device_random_state, gpu)


def _gpu_of(model: Module) -> torch.device | None:
    devices = (store.memory.torch_device for store in stores_of(model))
    return next((device for device in devices if device.type == "cuda"), None)


def dump_objects(objects: Objects) -> bytes:
    """Return objects as bytes that can be loaded safely; ConfigError if that is not possible."""
    buffer = io.BytesIO()
    contents = {field.name: getattr(objects, field.name) for field in fields(objects)}
    try:
        torch.save(contents, buffer)
        torch.load(io.BytesIO(buffer.getbuffer()), weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            "extra, or an option or state of the optimizer, cannot be saved so that loading it is safe: it must be made of "
            f"numbers, strings, tensors, lists, tuples and dicts ({reason})"
        ) from error
    return buffer.getvalue()


def load_objects(content: bytes, path: Path) -> Objects:
    """Return objects from the bytes that ``dump_objects`` made; ``path`` is for messages.

    CheckpointError for anything else, even with a correct checksum: fields of wrong types are refused.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed, which would let it grow without bounds")
        objects = Objects(**torch.load(io.BytesIO(content), weights_only=True))
        _check_kinds(objects)
    except _UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read ({error}); load another checkpoint") from error
    return objects


def check_options(objects: Objects, optimizer: Optimizer, path: Path) -> None:
    """Raise CheckpointError unless options have the types of the optimizer's own; unknown options are ignored."""
    for index, (group, options) in enumerate(zip(optimizer.param_groups, objects.options, strict=True)):
        for name, value in options.items():
            if name == "params" or (name in group and not _is_alike(group[name], value)):
                raise CheckpointError(
                    f"{path} is damaged: option '{name}' of parameter group {index} is {value!r:.60}, which is not of the "
                    "kind that the optimizer has there; load another checkpoint"
                )


# Errors that reading a malicious file may raise.
_UNREADABLE = (
    pickle.PickleError,
    zipfile.BadZipFile,
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    LookupError,
    EOFError,
    MemoryError,
    struct.error,
)


def _check_kinds(objects: Objects) -> None:
    """Raise ValueError unless every field has its type, and random states are valid."""
    for name, kind in (("options", list), ("states", dict), ("modules", dict)):
        if not isinstance(getattr(objects, name), kind):
            raise ValueError(f"its {name} are no {kind.__name__}")
    for kept in (objects.options, objects.states.values()):
        if not all(isinstance(options, dict) for options in kept):
            raise ValueError("its options and states are not dicts")
    if not all(isinstance(key, str) for options in objects.options for key in options):
        raise ValueError("an option has no name")
    for state in objects.rank_random_states or ():
        torch.Generator().set_state(state)
    if objects.cuts is not None and not isinstance(objects.cuts, list):
        raise ValueError("its cuts are no list")
    if not all(isinstance(name, str) for name in (*objects.states, *objects.modules, *(objects.cuts or ()))):
        raise ValueError("a state has no name")
    if any(isinstance(value, Tensor) for state in objects.states.values() for value in state.values()):
        raise ValueError("a state is a tensor, and those have a file of their own")
    torch.Generator().set_state(objects.random_state)  # raises if it is not a valid state
    if objects.device_random_state is not None:
        _check_device_state(objects.device_random_state)


def _check_device_state(state: object) -> None:
    if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.dim() != 1 or state.device.type != "cpu":
        raise ValueError("its random state of the device is none")
    if torch.cuda.is_available():
        torch.Generator("cuda").set_state(state)


def _is_alike(here: object, there: object) -> bool:
    """Return whether an option may replace another: it has the same type, or is optional."""
    if isinstance(here, bool):
        return there is None or isinstance(there, bool)
    if _is_number(here):
        return _is_number(there)
    if isinstance(here, list | tuple):
        return (
            isinstance(there, list | tuple)
            and len(here) == len(there)
            and all(_is_alike(mine, other) for mine, other in zip(here, there, strict=True))
        )
    return here is None or there is None or isinstance(there, type(here))


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype != torch.bool
    return isinstance(value, int | float | complex) and not isinstance(value, bool)
