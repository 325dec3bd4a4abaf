"""The Dynamo backend "zinf": ``torch.compile(model, backend="zinf")`` on a model that was never optimized."""

import re
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Parameter

from zinf_compile.config import make_config
from zinf_compile.errors import UnsupportedError
from zinf_compile.passes.capture import parameter_placeholders
from zinf_compile.passes.contract import ParameterHandle, PrepareInputs
from zinf_compile.passes.fx_edit import copy_graph_module
from zinf_compile.passes.pipeline import prepare_graph
from zinf_compile.runtime.numbers import find_record
from zinf_compile.runtime.slots import record_of
from zinf_compile.runtime.store import Store
from zinf_compile.session import Session, check_devices, session_of_store

# The sessions of models that were compiled without ``optimize``, by the options object of their torch.compile call,
# which is one and the same for all graphs of that call. The options are kept alive so that ids are never reused.
_sessions_by_options: dict[int, tuple[object, "weakref.ref[Store]"]] = {}


def zinf(
    graph_module: fx.GraphModule, inputs: Sequence[Tensor], *, options: Mapping[str, object] | None = None
) -> Callable[..., Any]:
    """``torch.compile(model, backend="zinf", options={...})``: the options of ``optimize``, on a model as it is.

    Parameters are taken into a store at the first call. A model that was optimized before brings its own store.
    """
    for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.zinf.gather):
        return session_of_store(find_record(node.args[1]).store).compile(graph_module, inputs)
    parameters = parameter_placeholders(graph_module, inputs)
    session = _find_session(parameters, options)
    fresh = {name: parameter for name, parameter in parameters.items() if record_of(parameter) is None}
    check_devices(fresh, session.config.device)
    if fresh:
        names = _readable_names(fresh, session.store.records)
        session.adopt({names[name]: parameter for name, parameter in fresh.items()}, as_home=False)
    for parameter in parameters.values():
        record = record_of(parameter)
        if record is not None and record.gradient is None and parameter.requires_grad:
            session.thaw(record)
    handles = {name: _handle(parameter) for name, parameter in parameters.items()}
    graph_module = copy_graph_module(graph_module)  # Dynamo keeps reading its own
    prepare_graph(graph_module, PrepareInputs(handles=handles))
    anchors = [session.store.anchor, session.store.frozen_anchor] if parameters else []
    compiled = session.compile(graph_module, [*anchors, *inputs])

    def call(*args: Any) -> Any:
        return compiled(*anchors, *args)

    return call


def _find_session(parameters: Mapping[str, Parameter], options: Mapping[str, object] | None) -> Session:
    for parameter in parameters.values():
        if (record := record_of(parameter)) is not None:
            return session_of_store(record.store)
    _, known = _sessions_by_options.get(id(options), (None, None))
    store = known() if known is not None and options is not None else None
    if store is not None:
        return session_of_store(store)
    config = make_config(options or {})
    if config.is_apart:
        raise UnsupportedError(
            f"device={config.device!r}: parameters would leave the device that torch.compile has seen them on; say "
            "zinf_compile.optimize(model, ...), which a call captures afterwards"
        )
    session = Session(config, "model")
    if options is not None:
        _sessions_by_options[id(options)] = (options, weakref.ref(session.store))
    return session


def _handle(parameter: Parameter) -> ParameterHandle:
    record = record_of(parameter)
    assert record is not None
    tensor = record.compute.tensor
    return ParameterHandle(
        name=record.name,
        param=record.param,
        shape=tuple(tensor.shape),
        dtype=record.dtype,
        device=record.store.memory.torch_device,
        trainable=record.gradient is not None,
    )


_DYNAMO_NAME = re.compile(r"_(?:modules|parameters|buffers)_")
_DYNAMO_ROOT = re.compile(r"^[lg]_(?P<root>\w+?)(?=_(?:modules|parameters)_)")


def _readable_names(placeholders: Iterable[str], taken: Container[str]) -> dict[str, str]:
    """Return parameters' names by Dynamo's: ``l_self_modules_layers_modules_0_parameters_weight_`` and the like.

    A name that another parameter has, as when one function calls two models, keeps what the function calls its model.
    """
    names: dict[str, str] = {}
    for placeholder in placeholders:
        root = _DYNAMO_ROOT.match(placeholder)
        path = placeholder.removesuffix("_")[root.end() if root else 0 :]
        name = ".".join(part for part in _DYNAMO_NAME.split(path) if part)
        if root is not None and (name in taken or name in names.values()):
            name = f"{root['root']}.{name}"
        while name in taken or name in names.values():
            name += "_"
        names[placeholder] = name
    return names
