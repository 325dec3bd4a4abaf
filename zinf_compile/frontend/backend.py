"""The Dynamo backend "zinf": ``torch.compile(model, backend="zinf")`` for a model that was not optimized."""

import re
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Parameter

from zinf_compile.driver.components import handle_of
from zinf_compile.driver.session import Session, check_devices, session_of_store
from zinf_compile.ir.config import make_config
from zinf_compile.ir.errors import ConfigError, UnsupportedError
from zinf_compile.passes.capture.aot import guard_placeholders, parameter_placeholders
from zinf_compile.passes.contract import PrepareInputs
from zinf_compile.passes.fx_edit import copy_graph_module
from zinf_compile.passes.pipeline import prepare_graph
from zinf_compile.runtime.model.quantised import has_own_bytes
from zinf_compile.runtime.params.numbers import find_record
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.store.store import Store, store_of

# Sessions of models that were compiled without ``optimize``, by the id of the options object of their torch.compile
# call. All graphs of one call share that object. It is kept alive so that its id is never reused.
_sessions_by_options: dict[int, tuple[object, "weakref.ref[Store]"]] = {}


def zinf(
    graph_module: fx.GraphModule, inputs: Sequence[Tensor], *, options: Mapping[str, object] | None = None
) -> Callable[..., Any]:
    """Compile a graph of ``torch.compile(model, backend="zinf", options={...})``, with the options of ``optimize``.

    The first call takes the parameters into a store. A model that was optimized before already has its own store.
    """
    for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.zinf.gather):
        return session_of_store(store_of(find_record(node.args[1]))).compile(graph_module, inputs)
    if options is not None and options.get("verify_store"):
        raise ConfigError(
            "verify_store=True needs parameters that observe writes, and with backend='zinf' they keep their class; call "
            "zinf_compile.optimize(model, verify_store=True), or leave it out"
        )
    if options is not None and options.get("frozen_dtype") is not None:
        raise ConfigError(
            "frozen_dtype needs to know which modules have which parameters, and with backend='zinf' graphs have only "
            "parameters; call zinf_compile.optimize(model, frozen_dtype='int8'), or leave it out"
        )
    found = parameter_placeholders(graph_module, inputs)
    parameters = {name: parameter for name, parameter in found.items() if not has_own_bytes(parameter)}
    guard_placeholders(graph_module, parameters)
    session = _find_session(parameters, options)
    fresh = {name: parameter for name, parameter in parameters.items() if record_of(parameter) is None}
    check_devices(fresh, session.config.device)
    if fresh:
        names = _readable_names(fresh, session.store.records)
        session.adopt({names[name]: parameter for name, parameter in fresh.items()}, as_home=False)
    for parameter in parameters.values():
        record = record_of(parameter)
        if record is not None and record.gradient.slot is None and parameter.requires_grad:
            session.unfreeze(record)
    records = {name: record_of(parameter) for name, parameter in parameters.items()}
    handles = {name: handle_of(record) for name, record in records.items() if record is not None}
    graph_module = copy_graph_module(graph_module)  # Dynamo still uses the original
    prepare_graph(graph_module, PrepareInputs(handles=handles))
    anchors = [session.store.anchor, session.store.frozen_anchor] if parameters else []
    compiled = session.compile(graph_module, [*anchors, *inputs])
    # Parameters keep their session alive. Without parameters, the compiled graph does.
    held = None if session.store.records else session

    def call(*args: Any, _held: Session | None = held) -> Any:
        return compiled(*anchors, *args)

    return call


def _find_session(parameters: Mapping[str, Parameter], options: Mapping[str, object] | None) -> Session:
    for parameter in parameters.values():
        if (record := record_of(parameter)) is not None:
            return session_of_store(store_of(record))
    _, known = _sessions_by_options.get(id(options), (None, None))
    store = known() if known is not None and options is not None else None
    if store is not None:
        return session_of_store(store)
    config = make_config(options or {})
    if not config.memory.unified:
        raise UnsupportedError(
            f"device={config.device!r}: parameters would leave the device that torch.compile has seen them on; say "
            "zinf_compile.optimize(model, ...), which a call captures afterwards"
        )
    session = Session(config, "model")
    if options is not None:
        _sessions_by_options[id(options)] = (options, weakref.ref(session.store))
    return session


_DYNAMO_NAME = re.compile(r"_(?:modules|parameters|buffers)_")
_DYNAMO_ROOT = re.compile(r"^[lg]_(?P<root>\w+?)(?=_(?:modules|parameters)_)")


def _readable_names(placeholders: Iterable[str], taken: Container[str]) -> dict[str, str]:
    """Return parameter names by placeholder, such as ``l_self_modules_layers_modules_0_parameters_weight_``.

    A name that is taken, as when one function calls two models, is prefixed with the function's variable of the model.
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
