"""What a checkpoint holds beside the tensors of the model and its optimizer: options, counts, random state, extra."""

import io
import pickle
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from zinf_compile.errors import CheckpointError, ConfigError
from zinf_compile.runtime.model_state import modules_with_state, stores_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """All of it, as torch's safe loader takes it: numbers, strings, tensors, and containers of these."""

    extra: Any
    options: list[dict[str, Any]]  # of each parameter group
    states: dict[
        str, dict[str, Any]
    ]  # by parameter: what the optimizer keeps that is no tensor; for each it has state for
    modules: dict[str, Any]  # what modules with a get_extra_state() of their own hold
    random_state: Tensor  # of torch's CPU generator
    device_random_state: Tensor | None = None  # of that of the GPU that the model computes on


def collect_objects(model: Module, optimizer: Optimizer | None, extra: object) -> Objects:
    """Return the objects of a model and its optimizer."""
    groups = optimizer.param_groups if optimizer is not None else []
    states = optimizer.state if optimizer is not None else {}
    return Objects(
        extra=extra,
        options=[{key: value for key, value in group.items() if key != "params"} for group in groups],
        states={
            name: {key: value for key, value in states[parameter].items() if not isinstance(value, Tensor)}
            for name, parameter in model.named_parameters()
            if parameter in states
        },
        modules={path: module.get_extra_state() for path, module in modules_with_state(model).items()},
        random_state=torch.get_rng_state(),
        device_random_state=torch.cuda.get_rng_state(device) if (device := _gpu_of(model)) is not None else None,
    )


def set_random_states(objects: Objects, model: Module) -> None:
    """Let random numbers go on as they would have where the checkpoint was made, on the host and on the model's GPU."""
    torch.set_rng_state(objects.random_state)
    if objects.device_random_state is not None and (device := _gpu_of(model)) is not None:
        torch.cuda.set_rng_state(objects.device_random_state, device)


def _gpu_of(model: Module) -> torch.device | None:
    devices = (store.memory.torch_device for store in stores_of(model))
    return next((device for device in devices if device.type == "cuda"), None)


def dump_objects(objects: Objects) -> bytes:
    """Return objects as bytes that can be loaded safely; ConfigError for those that cannot."""
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
    """Return objects from the bytes that ``dump_objects`` made; ``path`` is for messages."""
    try:
        return Objects(**torch.load(io.BytesIO(content), weights_only=True))
    except (pickle.PickleError, RuntimeError, TypeError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); load another checkpoint") from error
