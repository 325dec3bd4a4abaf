"""Components of quantised parameters in captured graphs: which inputs show them, and whether they still do."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zinf_compile.ir.errors import StoreError, UnsupportedError
from zinf_compile.passes.capture.aot import guard_placeholders
from zinf_compile.passes.contract import ComponentHandle, ComponentInputs, ParameterHandle
from zinf_compile.passes.fx_edit import copy_graph_module
from zinf_compile.passes.pipeline import gather_components
from zinf_compile.runtime.model.quantised import components_of
from zinf_compile.runtime.params.records import StoredParameter
from zinf_compile.runtime.store.store import Store


def handle_of(record: StoredParameter) -> ParameterHandle:
    """Return how graphs name a stored parameter."""
    return ParameterHandle(
        name=record.name,
        param=record.param,
        shape=tuple(record.copies.compute.tensor.shape),
        dtype=record.dtype,
        device=record.store.memory.torch_device,
        trainable=record.gradient.slot is not None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """A component in an input of a graph."""

    number: int  # of the input
    path: tuple[str, ...]
    name: str
    of_record: "weakref.ref[StoredParameter]"  # Dynamo keeps compiled graphs, which must not keep a store


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentCheck:
    """What a graph that gathers components does before each call."""

    anchor: Tensor | None = None  # to be passed before the inputs of the original graph
    shown: tuple[_Shown, ...] = ()

    def arguments(self, args: Sequence[Any]) -> Sequence[Any]:
        """Return what to call the graph with. UnsupportedError if an input no longer shows its component."""
        for shown in self.shown:
            record = shown.of_record()
            if record is None:
                raise StoreError(
                    f"a captured graph was called after the model with '{shown.name}' was dropped; keep it"
                )
            if not _shows(_follow(args[shown.number], shown.path), record):
                raise UnsupportedError(
                    f"'{shown.name}' was given other memory after optimize(), and captured graphs gather what was stored "
                    "of it; change quantised weights before zinf_compile.optimize(model)"
                )
        return args if self.anchor is None else [self.anchor, *args]


class BoundGraph(NamedTuple):
    """A torch-level graph that gathers the components among its inputs."""

    graph_module: fx.GraphModule
    inputs: Sequence[Tensor]
    check: ComponentCheck


def bind_components(store: Store, graph_module: fx.GraphModule, inputs: Sequence[Tensor]) -> BoundGraph:
    """Let a torch-level graph gather the components that its inputs show; the graph itself if there is none."""
    at = components_of(store)
    shown: list[_Shown] = []
    handles: dict[str, tuple[ComponentHandle, ...]] = {}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for number, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
        found = dict(_components_in(value, at)) if at else {}
        if found:
            handles[node.name] = tuple(ComponentHandle(path=path, of=handle_of(each)) for path, each in found.items())
            shown += (
                _Shown(number=number, path=path, name=each.name, of_record=weakref.ref(each))
                for path, each in found.items()
            )
    if not handles:
        return BoundGraph(graph_module, inputs, ComponentCheck())
    guard_placeholders(graph_module, handles)
    known = next(
        (node.name for node, value in zip(placeholders, inputs, strict=True) if value is store.frozen_anchor), None
    )
    graph_module = copy_graph_module(graph_module)  # Dynamo still uses the original
    gather_components(graph_module, ComponentInputs(handles=handles, frozen_anchor=known))
    anchor = store.frozen_anchor if known is None else None
    check = ComponentCheck(anchor=anchor, shown=tuple(shown))
    return BoundGraph(graph_module, inputs if anchor is None else [anchor, *inputs], check)


def _components_in(
    value: Any, at: Mapping[int, StoredParameter], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], StoredParameter]]:
    """Yield the components that a tensor shows: itself, or tensors that it wraps, with the attributes that lead to them."""
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from _components_in(getattr(value, name), at, (*path, name))
        return
    if not isinstance(value, Tensor):
        return
    with torch._C.DisableTorchFunctionSubclass():
        record = at.get(value.data_ptr()) if value.device.type == "cpu" and value.layout is torch.strided else None
    if record is not None and _shows(value, record):
        yield path, record


def _follow(value: object, path: Sequence[str]) -> object:
    for name in path:
        value = getattr(value, name)
    return value


def _shows(value: object, record: StoredParameter) -> bool:
    home = record.copies.master.tensor
    with torch._C.DisableTorchFunctionSubclass():
        return (
            isinstance(value, Tensor)
            and value.data_ptr() == home.data_ptr()
            and (value.shape, value.stride(), value.dtype) == (home.shape, home.stride(), home.dtype)
        )
